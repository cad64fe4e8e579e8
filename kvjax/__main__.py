"""Runs a command, or lists commands and configs.

kvjax train --config=configs/lrkv_tiny.py      the same as python -m kvjax.main
kvjax                                          lists commands and configs
"""

import runpy
import sys
import textwrap

from kvjax import __version__, _start_early
from kvjax.foundation import command_line, environment, interrupted, output
from kvjax.foundation.errors import UserError
from kvjax.foundation.text import did_you_mean

COMMANDS = {  # word after `kvjax`: module, summary
    "train": ("kvjax.main", "trains the model of a config; its --help lists all keys"),
    "generate": ("kvjax.generate", "generates text with a trained model"),
    "chat": ("kvjax.chat", "chats with a mid-trained or imported model"),
    "convert": ("kvjax.convert", "imports a published model, with a smaller KV cache"),
    "export": ("kvjax.convert.export", "exports a workdir's model for other programs"),
    "evaluate": (
        "kvjax.evaluate",
        "runs benchmarks: ARC, MMLU, GSM8K, HumanEval (sandboxed), CORE",
    ),
    "lm_eval": ("kvjax.lm_eval", "runs tasks of lm-evaluation-harness on a trained model"),
    "analyze": (
        "kvjax.analysis",
        "measures attention in a trained model: the papers' figures on a page",
    ),
    "compare": ("kvjax.compare", "compares training runs: curves, means over seeds, a page"),
    "sweep": ("kvjax.sweep", "trains a grid: values of config keys, times seeds; resumes"),
    "costs": ("kvjax.costs", "computes parameters, cache bytes and FLOPs of a config"),
    "aot": ("kvjax.aot", "compiles a run for absent chips: memory, roofline, best mesh"),
    "prepare": ("kvjax.data.prepare", "turns text into packed rows"),
    "profile": (
        "kvjax.kernels.profile",
        "times decode kernels, or reads the compiler's schedule",
    ),
}


def main(arguments: list[str]) -> None:
    """Prints the overview."""
    parser = command_line.Parser(__doc__)
    parser.parse(arguments)
    print(f"kvjax {__version__}: attention with a small KV cache, in JAX\n")
    print("Commands, each with --help; `python -m MODULE` runs the same:\n")
    for word, (module, text) in COMMANDS.items():
        show(f"kvjax {word:<9} {module}", text)
    print("\nConfigs, as --config=configs/lrkv_tiny.py:\n")
    for name, text in command_line.config_list().items():
        show(name, text)
    print("\nIn a checkout, `python -m experiments` lists experiments.")


def show(name: str, text: str) -> None:
    """Prints a name and its text in two columns, wrapped."""
    start = f"  {name}"
    start = f"{start:<38}" if len(start) < 37 else f"{start}  "
    print(
        textwrap.fill(
            text,
            output.width(),
            break_on_hyphens=False,
            initial_indent=start,
            subsequent_indent=" " * 38,
        )
    )


def entry() -> None:
    """Runs `kvjax WORD ...`: the console script, and `python -m kvjax`."""
    word, *rest = sys.argv[1:] or [""]
    if word not in COMMANDS:
        sys.argv[0] = "kvjax"
        command_line.run(_listing)
    sys.argv = [f"kvjax {word}", *rest]
    interrupted.quietly()  # before the command's imports
    environment.watch_imports()
    _start_early([word])
    module, _ = COMMANDS[word]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


def _listing(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], COMMANDS)
        words = ", ".join(COMMANDS)
        raise UserError(f"unknown command {arguments[0]!r}{hint or f'; there are {words}'}")
    main(arguments)


if __name__ == "__main__":
    entry()
