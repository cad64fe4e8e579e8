"""Notebooks run from top to bottom; their stored outputs are complete and free of paths."""

import pathlib
import re

import nbformat
import pytest

from kvjax.foundation.checkout import ROOT
from tests import notebooks

REPOSITORY = "https://github.com/kvjax/kvjax"
PICTURES = dict(quickstart=2, kernels=7, launch=5, convert=1, analysis=4, evaluation=1, compare=1)
MACHINE = re.compile(r"/(root|home|work|tmp|var|usr|opt|Users|site-packages)\b|https?://(?!github)")
# On two CPU cores; a stored figure is no larger than it must be.
MAX_BYTES = 400_000

of_each = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_there():
    assert {path.stem for path in notebooks.NOTEBOOKS} == PICTURES.keys()


@of_each
def test_what_is_stored(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MAX_BYTES
    counts = [cell.execution_count for cell in _code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "execute it: python -m tests.notebooks"
    assert not any("execution" in cell.metadata for cell in notebook.cells)
    assert not any(output.output_type == "error" for output in notebooks.outputs(notebook))
    assert notebooks.pictures(notebook) == PICTURES[path.stem]
    assert not MACHINE.search(notebooks.text(notebook))


@of_each
def test_colab(path):
    """A badge that opens this file, and an installation that does nothing elsewhere."""
    notebook = nbformat.read(path, as_version=4)
    in_colab = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github")
    assert f"({in_colab}/blob/main/notebooks/{path.name})" in notebook.cells[0].source
    install = _code(notebook)[0]
    first, guard, *body = [line for line in install.source.splitlines() if line]
    assert (first, guard) == ("import sys", 'if "google.colab" in sys.modules:')
    assert all(line.startswith("    ") for line in body) and not install.outputs
    assert f" {REPOSITORY} " in install.source and notebook.metadata.accelerator == "TPU"
    extras = re.search(r'extra = "([\w,]+)"', install.source)[1].split(",")
    setup = (ROOT / "setup.py").read_text()
    assert all(f'\n        "{extra}": ' in setup for extra in extras)


@of_each
def test_links_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for link in re.findall(r"\]\(([^)]+)\)", cell.source if "mark" in cell.cell_type else ""):
            assert "://" in link or (path.parent / link).exists(), link


def _quickstart(text):
    assert float(re.search(r"largest difference (\S+) of", text)[1]) < 1e-10
    assert float(re.search(r"([\d.]+) bits per byte", text)[1]) < 2.49  # of xz -9e
    assert "tokens x 3,136" in text  # cache bytes per token of LRKV in float32


def _kernels(text):
    fits = re.findall(r"^(\w+): ([\d,]+) on v5e", text, re.M)  # from the largest cache to the least
    tokens = [int(count.replace(",", "")) for _, count in fits]
    assert len(fits) == 5 and fits[0][0] == "mha" and tokens == sorted(tokens)
    assert "5 of 5 measured" in text
    assert "saved schedules" in text or "v5e, lrkv: " in text


def _launch(text):
    for topology in ("v4:4x4x4", "v5e:8x8", "v5p:2x2x4", "h200:8"):
        assert f"{topology:10} " in text
    assert "--topology=v5p:2x2x4" in text and "--tpu-type=v5p-32" in text
    assert "srun python -m kvjax.main --config=configs/lrkv_2p5b.py --workdir=" in text


def _convert(text):
    measured = re.findall(r"(.+): ([\d,]+) bytes per token, perplexity ([\d.]+)", text)
    (gqa, *sizes), (before, converted, refitted) = (
        [size for _, size, _ in measured],
        [float(perplexity) for _, _, perplexity in measured],
    )
    assert (gqa, *sizes) == ("23,040", "11,520", "11,520")
    assert before < refitted < converted < 1.3 * before
    assert "engines cache C = 128 and P = 64" in text and "DeepseekV3ForCausalLM" in text
    whole, half = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes of live", text))
    assert whole == 2 * half
    assert text.count("The capital of France is Paris") == 2


def _analysis(text):
    """Checks the statements of its text about the model."""
    share = float(re.search(r"mean over layers: ([\d.]+) % of the heads", text)[1])
    assert 50 < share < 100
    needed = [int(n) for n in re.findall(r"(\d+) of 64 components hold 90 %", text)]
    assert len(needed) == 3 and needed[0] > 2 * max(needed[1:])
    more = dict(re.findall(r"(weights' SVD|other passages), 32 of 64: \+([\d.]+) %", text))
    assert float(more["weights' SVD"]) > 4 * float(more["other passages"])


def _evaluation(text):
    """Checks its text: letters are little more than a habit, texts show knowledge."""

    def count(label):
        return [int(n) for n in re.findall(rf"(\d+) of 10 {label}", text)]

    by_letter, by_text = count("right"), count("by their texts")
    assert len(by_letter) == len(by_text) == 2 and min(by_text) > max(by_letter)
    assert "half: 11,520 bytes of cache" in text and "The capital of France is Paris" in text
    assert len(re.findall(r"\d of 8 right", text)) == 2
    assert "a right one: passed" in text and text.count(": failed: ") == 3


def _compare(text):
    """Checks its text: seeds differ more than mechanisms, paired differences less."""
    assert "9 runs" in text
    spread = float(re.search(r"^mha +[\d.]+ ± ([\d.]+)", text, re.M)[1])
    gap, half = re.search(r"num_steps=80 .*, ([+-][\d.]+) from MHA ± ([\d.]+)", text).groups()
    assert spread > 3 * float(half) and spread > 3 * abs(float(gap))
    assert "within a run: " in text and "at equal horizon: " in text


CHECKS = dict(
    compare=_compare,
    quickstart=_quickstart,
    kernels=_kernels,
    launch=_launch,
    convert=_convert,
    analysis=_analysis,
    evaluation=_evaluation,
)


_FIRST = ("quickstart", "kernels", "launch")  # whose execution no commit goes without


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.whole] * (path.stem in _FIRST))
        for path in notebooks.NOTEBOOKS
    ],
)
def test_runs_from_top_to_bottom(path: pathlib.Path, tmp_path):
    """Each has a folder of its own, and finds what others prepared or compiled, as readers do."""
    notebook = notebooks.execute(path, tmp_path)
    assert notebooks.pictures(notebook) == PICTURES[path.stem]
    CHECKS[path.stem](notebooks.text(notebook))
