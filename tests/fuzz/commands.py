"""The commands, working arguments for each, and unusual values."""

import pathlib
import sys

from kvjax.foundation.checkout import ROOT

CONFIGS = ("lrkv_tiny", "mla_tiny", "mla_paper_tiny", "kv_tied_tiny", "qk_tied_plus_tiny")
CONFIGS += ("thin_keys_tiny", "rivals.py:tpa_wide_tiny", "rivals.py:mlra2_narrow_tiny")
CONFIGS += ("rivals.py:gta_narrow_tiny",)
PRODUCT = ("kvjax", "kvjax.main", "kvjax.generate", "kvjax.costs", "kvjax.aot")
PRODUCT += ("kvjax.convert", "kvjax.convert.export", "kvjax.analysis", "kvjax.data.prepare")
PRODUCT += ("kvjax.kernels.profile", "kvjax.evaluate", "kvjax.chat", "kvjax.compare")
PRODUCT += ("kvjax.lm_eval", "kvjax.sweep")
CHILDREN = ("jax_training", "torch_training")  # child processes of train_benchmark
EXPERIMENTS = tuple(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text() and path.stem not in CHILDREN
)

MISSING, FOLDER, FILE = "../shared/missing", "folder", "notes.txt"
PIPE = "../shared/pipe"  # has no writer: opening it blocks
LONG, NO_UTF8, SURROGATE, SNOWMAN = "x" * 1000, "\udcff", "\ud800", "\u2603"
HUGE = str(2**63)
EMPTY = ""

RUN = (  # arguments of kvjax.main with which a config is trained on a small text
    *("--workdir=run", "--config.data.source=../shared/text.txt"),
    *("--config.data.directory=../shared/data", "--config.data.tokenizer=byte"),
    *("--config.data.vocab_size=257", "--config.data.sequence_length=32"),
)
# By command: working arguments, and a text that it then prints.
WORKING = {
    "kvjax": ((), "Commands"),
    "kvjax.main": (RUN, "would train"),
    "kvjax.generate": (("--workdir=../shared/trained", "--prompt=a"), "would generate"),
    "kvjax.costs": ((), "Parameters"),
    "kvjax.aot": (("--topology=v5e:2x2",), "would compile"),
    "kvjax.convert": (("--source=../shared/trained", "--out=out"), "would convert"),
    "kvjax.convert.export": (("--workdir=../shared/trained", "--out=out"), "would export"),
    "kvjax.analysis": (("--workdir=../shared/trained", "--out=out"), "would analyse"),
    "kvjax.evaluate": (
        (
            *("--workdir=../shared/talking", "--tasks=mmlu,ruler_niah_single_1"),
            *("--data=../shared/questions", "--ruler_lengths=700", "--ruler_samples=2"),
        ),
        "would evaluate",
    ),
    "kvjax.compare": (("../shared/trained", "--out=out"), "written"),
    "kvjax.sweep": (("lrkv_tiny", "--seeds=2", "--plan"), "2 runs of 2 to train"),
    "kvjax.chat": (("--workdir=../shared/talking",), ""),
    "kvjax.lm_eval": (("--workdir=../shared/trained", "--tasks=piqa"), "would ask"),
    "kvjax.data.prepare": (
        ("--source=../shared/text.txt", "--tokenizer=byte", "--output=out", "--sequence_length=32"),
        "datasets",
    ),
    "kvjax.kernels.profile": ((), "would measure"),
    "experiments.benchmarks.beside_transformers": (("--workdir=../shared/trained",), ""),
    "experiments.evaluation.agreement": (
        ("--workdir=../shared/talking", f"--python={sys.executable}"),
        "",
    ),
    "experiments.evaluation.token_eviction": (
        ("--workdir=../shared/talking", f"--python={sys.executable}"),
        "",
    ),
    "experiments.device_run": (("--run", "--device=cpu", "--folder=../shared/missing"), ""),
    "experiments.studies.depth_8": (("--data=../shared/rows",), ""),
    "experiments.studies.language_models": (("--study=lrkv_ranks",), ""),
    "experiments.studies.word_models": (("--set=wikitext2", "--folder=folder"), ""),
    "experiments.studies.images": (("--set=mnist", "--folder=folder"), ""),
    "experiments.evaluation.at_hand": (("--packages=folder", "--out=out"), ""),
}


def config_path(name: str) -> pathlib.Path:
    """Returns a config's path from "lrkv_tiny" or "rivals.py:tpa_wide_tiny"."""
    return ROOT / "configs" / (name if ".py:" in name else f"{name}.py")


def config_file(name: str) -> str:
    return f"--config={config_path(name)}"
