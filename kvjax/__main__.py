"""Lists the commands and configs.

python -m kvjax
python -m kvjax.main --config=configs/lrkv_tiny.py
"""

import textwrap

from kvjax import __version__
from kvjax.foundation import command_line, output

COMMANDS = {
    "kvjax.main": "trains the model of a config; its --help lists all keys",
    "kvjax.generate": "generates text with a trained model",
    "kvjax.chat": "chats with a mid-trained or imported model",
    "kvjax.convert": "imports a published model, with a smaller KV cache",
    "kvjax.convert.export": "exports a workdir's model for other programs",
    "kvjax.evaluate": "runs benchmarks: ARC, MMLU, GSM8K, HumanEval (sandboxed), CORE",
    "kvjax.lm_eval": "runs tasks of lm-evaluation-harness on a trained model",
    "kvjax.analysis": "measures attention in a trained model: the papers' figures on a page",
    "kvjax.compare": "compares training runs: curves, means over seeds, a page",
    "kvjax.costs": "computes parameters, cache bytes and FLOPs of a config",
    "kvjax.aot": "compiles a run for absent chips: memory, roofline, best mesh",
    "kvjax.data.prepare": "turns text into packed rows",
    "kvjax.kernels.profile": "times decode kernels, or reads the compiler's schedule",
}


def main(arguments: list[str]) -> None:
    """Prints the overview."""
    parser = command_line.Parser(__doc__)
    parser.parse(arguments)
    print(f"kvjax {__version__}: attention with a small KV cache, in JAX\n")
    print("Commands, each with --help:\n")
    for name, text in COMMANDS.items():
        show(f"python -m {name}", text)
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


if __name__ == "__main__":
    command_line.run(main)
