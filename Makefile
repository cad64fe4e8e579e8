# Two commands for a newcomer: `make demo` and `make test`. Each makes .venv first if it is missing.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
BIN := .venv/bin
DEMO_ARGS ?=

export TF_CPP_MIN_LOG_LEVEL := 2

.PHONY: demo test test-all test-tpu lint clean

demo: .venv/installed  ## trains configs/lrkv_tiny.py on the embedded corpus and prints its figures
	$(BIN)/python -m kvjax.main $(DEMO_ARGS)

test: .venv/installed  ## the tests that take seconds
	$(BIN)/pytest -q -n 2 -m "not slow and not tpu"

test-all: .venv/installed  ## all tests
	$(BIN)/pytest -q -n 2 -m "not tpu"

test-tpu: .venv/aot  ## compiles for TPUs that are not there
	$(BIN)/pytest -q -m tpu

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvjax needs Python 3.12 or newer: set PYTHON=...") if sys.version_info < (3, 12) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/aot: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[aot]'
	touch $@

clean:
	rm -rf .venv runs
