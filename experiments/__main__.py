"""Lists the experiments, each a command with --help.

python -m experiments
"""

from experiments.record import EXPERIMENTS
from kvjax.__main__ import show
from kvjax.foundation import command_line


def main(arguments: list[str]) -> None:
    """Prints the name and purpose of each experiment."""
    command_line.Parser(__doc__).parse(arguments)
    for path in sorted(EXPERIMENTS.rglob("*.py")):
        text = path.read_text("utf-8")
        if path.name != "__main__.py" and "__main__" in text:
            name = ".".join(path.relative_to(EXPERIMENTS.parent).with_suffix("").parts)
            first = text.removeprefix('"""').partition("\n")[0].removesuffix('"""')
            show(f"python -m {name}", first)


if __name__ == "__main__":
    command_line.run(main)
