"""The command line of a benchmark: options as data, a measurement, its tables and its record."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses

from experiments import record
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.configuration import at_least, between, one_of
from kvjax.foundation.output import Output

Options = argparse.Namespace  # the checked options of a command line
Columns = Mapping[str, str | Callable[[Mapping], object]]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option; its default determines its type.

    Attributes:
      default: False makes a flag, True a flag with a negation; a list makes an option that may be
        repeated; with None and "" the value may be missing.
      help: the help text without the default.
      least, most: bounds of a number, or of each number of a list.
      known: allowed values, or names of a repeated option.
      parse: returns the value from the option's name and its text.
      kind: type of the value if the default is no number.
    """

    default: object
    help: str
    least: float | None = None
    most: float | None = None
    known: Sequence[str] = ()
    parse: Callable[[str, str], object] | None = None
    kind: type = str

    def add(self, parser: command_line.Parser, option: str) -> None:
        """Adds the option to a parser."""
        value = self.default
        first = value[0] if isinstance(value, list) and value else value
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        text = self.help if value in (None, "", False, True) else f"{self.help} ({shown})"
        if isinstance(value, bool):
            action = argparse.BooleanOptionalAction if value else "store_true"
            parser.add_argument(option, action=action, default=value, help=text)
            return
        kind = type(first) if isinstance(first, int | float) else self.kind
        how = dict(action="append") if isinstance(value, list) else dict(default=value)
        parser.add_argument(option, type=kind, help=text, **how)

    def checked(self, option: str, value):
        """Returns the value of the command line, parsed; raises a UserError outside the bounds."""
        if isinstance(self.default, list):
            value = value or self.default
        if self.parse is not None:
            value = self.parse(option, value)
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None or item == self.default == "":
                continue
            if self.known and isinstance(self.default, list):
                lists.one(option, item, self.known)
            elif self.known:
                one_of(option, item, self.known)
            if self.most is not None:
                between(option, item, self.least, self.most)
            elif self.least is not None:
                at_least(option, item, self.least)
        return value


def benchmark(
    name: str | Callable[[Options], str],
    doc: str,
    options: Mapping[str, Option],
    measure: Callable[[Options], dict],
    show: Callable[[dict, Output], None],
    *,
    check: Callable[[Options], None] = lambda options: None,
    start: Callable[[], None] = runtime.start,
    status: Callable[[dict], int] = lambda result: 0,
) -> Callable[[Sequence[str]], int]:
    """Returns the `main` of a benchmark.

    Args:
      name: name of the record in experiments/results, or a function of the options.
      doc: the module's docstring.
      measure: function from options to the JSON-able result.
      show: prints the result's tables.
      check: raises a UserError for options that do not fit together.
      start: configures the process before the measurement.
      status: function from the result to the exit status.
    """

    def main(arguments: Sequence[str]) -> int:
        parser = command_line.Parser(doc)
        for key, option in options.items():
            option.add(parser, f"--{key}")
        text = "write the record to experiments/results"
        parser.add_argument("--save", action="store_true", help=text)
        parser.add_output()
        parsed = parser.parse(arguments)
        for key, option in options.items():
            setattr(parsed, key, option.checked(f"--{key}", getattr(parsed, key)))
        record.check(parsed.save)
        check(parsed)
        start()
        result, out = measure(parsed), Output(parsed)
        show(result, out)
        record_name = name if isinstance(name, str) else name(parsed)
        record.record(record_name, result, out, save=parsed.save)
        return status(result)

    return main


def table(columns: Columns, rows: Sequence[Mapping]) -> tuple[tuple[str, ...], list[list]]:
    """Returns header and cells of `Output.table`.

    Args:
      columns: cells by title: a template such as "{seconds:.1f} s", or a function of the row.
    """
    cells = [
        [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]
    return tuple(columns), cells
