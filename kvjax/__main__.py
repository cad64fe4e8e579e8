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
    "kvjax.convert": "a published model in, its KV cache made smaller on the way",
    "kvjax.convert.export": "a workdir's model written for others to read",
    "kvjax.evaluate": "benchmarks: ARC, MMLU, GSM8K, HumanEval in a sandbox, CORE; two compared",
    "kvjax.lm_eval": "tasks of lm-evaluation-harness, asked of a trained model",
    "kvjax.analysis": "what attention does in a trained model: the papers' figures on a page",
    "kvjax.compare": "training runs beside each other: curves, means over seeds, a page",
    "kvjax.costs": "parameters, cache bytes and FLOPs of a config, from shapes",
    "kvjax.aot": "compiles a run for chips that are not there: fits? how fast at most?",
    "kvjax.data.prepare": "text to packed rows, once",
    "kvjax.kernels.profile": "decode kernels: time on a device, or its compiler's schedule",
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
