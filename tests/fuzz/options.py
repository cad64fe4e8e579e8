"""Cases with invalid values of every option; the options come from the commands' own parsers."""

import argparse
from collections.abc import Iterator
from unittest import mock

from kvjax.foundation import command_line
from tests.fuzz.case import Case, main_of
from tests.fuzz.commands import (
    FILE,
    FOLDER,
    HUGE,
    LONG,
    MISSING,
    NO_UTF8,
    PIPE,
    PRODUCT,
    SNOWMAN,
    SURROGATE,
    WORKING,
)


class _ParserReached(BaseException):
    """Carries the parser of a command out of its `main`, before it parses."""


def options_of(command: str) -> list[argparse.Action]:
    """Returns all options of a command, from its own parser."""

    def stop(parser, arguments):
        raise _ParserReached(parser)

    with mock.patch.object(command_line.Parser, "parse", stop):
        try:
            main_of(command)([])
        except _ParserReached as reached:
            (parser,) = reached.args
            return [a for a in parser._actions if a.option_strings and a.dest != "help"]
    raise AssertionError(f"{command} parses no options")


_WITH_RUNS = (
    *("cache_bits", "depth_8", "head_diversity"),
    *("language_models", "long_rows", "small_caches"),
)
# Valid values by command and option. They are not tried: the command would work, often for minutes.
_STARTS_WORK = {
    **dict.fromkeys(
        [f"experiments.studies.{study} runs" for study in _WITH_RUNS],
        frozenset(("../x", "a\x01b", SNOWMAN, FOLDER, MISSING, "x")),
    ),
    "experiments.benchmarks.train_benchmark set": {""},
    "experiments.evaluation.ruler name": {FOLDER, "x"},
    "experiments.evaluation.scores name": {FOLDER, "x"},
    "experiments.studies.set_anomaly features": {""},
    "kvjax.compare scores": {FOLDER},  # a folder without evaluations is valid
    "kvjax.data.prepare source": {FILE},
    "kvjax.evaluate ruler_text": {FILE, FOLDER},
}
# Messages on these options may name the other option instead.
_NAMED_IN_MESSAGES = {
    "runs": "--workdir",
    "set": "--config",
    "python": "--peers",
    "rows": "--folder",
}
# Options that may accept any text, by command; texts of other options must name existing things.
_FREE_TEXT = {
    "kvjax.main": ("workdir", "coordinator"),
    "kvjax.generate": ("prompt", "stop", "prompt_file", "dtype", "implementation", "workdir"),
    "kvjax.aot": ("output", "save"),
    "kvjax.convert": ("out", "text_key"),
    "kvjax.convert.export": ("out", "dtype"),
    "kvjax.analysis": ("workdir", "out", "text_key"),
    "kvjax.evaluate": ("workdir", "out", "dtype"),
    "kvjax.compare": ("out",),
    "kvjax.sweep": ("out",),
    "kvjax.chat": ("workdir", "system", "dtype"),
    "kvjax.lm_eval": ("workdir", "tasks", "include_path", "system", "dtype", "out"),
    "kvjax.data.prepare": ("validation_source", "text_key", "output"),
    "kvjax.kernels.profile": ("plot", "save"),
}
_EXTREME_INTEGERS = (HUGE, "0", "1000000000", "1000000000000")
_INVALID_INTEGERS = ("", "x", "1.5", "-1", "nan", "inf", SNOWMAN, NO_UTF8, "1,2", "-" + HUGE)
_INVALID_NUMBERS = ("", "x", "-1", "nan", "inf", "-inf", SNOWMAN, NO_UTF8)
_PATHS = ("/dev/null", PIPE, FOLDER, FILE, MISSING)
_TEXTS = (LONG, "../x", "a\x01b", SNOWMAN, NO_UTF8, SURROGATE, *_PATHS)


def option_cases(command: str) -> Iterator[Case]:
    """Yields the cases of a command.

    They are its working arguments alone; then with arguments that no command has; and with each
    option misspelt, without a value, and with invalid values.
    """
    working_arguments, printed = WORKING.get(command, ((), ""))

    def case(*arguments, status=(2,), **fields):
        arguments = (*working_arguments, *arguments)
        return Case(command=command, arguments=arguments, status=status, **fields)

    if printed:
        yield case(status=(0,), prints=printed)
    yield case("extra", message=("extra",))
    yield case("--no_such", message=("no_such",))
    yield case(SNOWMAN, message=(SNOWMAN,))
    yield case(NO_UTF8, message=("udcff", "?"))
    yield case("--", "x", message=("x",))
    yield case("-x", message=("-x",))
    if command not in ("kvjax.main", "kvjax.costs", "kvjax.aot"):
        yield case("--config.train.seed=1", message=("config.train.seed",))
    for action in options_of(command):
        option = action.option_strings[0]
        name = option.removeprefix("--")
        yield case(f"{option}x=1", message=(f"{name}x",))
        yield case(f"{option[:-1]}=1", message=(option[:-1],))
        if isinstance(action, argparse._VersionAction):
            yield case(option, status=(0,), prints="kvjax")
        elif action.nargs == 0:
            yield case(f"{option}=x", message=(name,))
            yield case(option, "x", message=("x", name))
        elif action.nargs == "?":  # the value is optional
            yield from _value_cases(command, action, case, name)
        else:
            yield case(option, message=(name,))
            yield from _value_cases(command, action, case, name)


def _value_cases(command: str, action: argparse.Action, case, name: str) -> Iterator[Case]:
    def option_with(value):
        return f"--{name}={value}"

    if name == "config":  # `tests.fuzz.keys` has the cases of configs
        return
    message = (name, name.replace("_", " "), _NAMED_IN_MESSAGES.get(name, name))
    starts_work = _STARTS_WORK.get(f"{command} {name}", set())
    maybe_valid = dict(message=message, status=(0, 1, 2) if command == "kvjax.aot" else (0, 2))
    numbers = {
        int: (_INVALID_INTEGERS, _EXTREME_INTEGERS),
        float: (_INVALID_NUMBERS, ("1e300", "0")),
    }
    if action.type in numbers:
        invalid, extreme = numbers[action.type]
        yield from (case(option_with(value), message=message) for value in invalid)
        if command in PRODUCT:
            yield from (case(option_with(value), **maybe_valid) for value in extreme)
    elif action.choices or name not in _FREE_TEXT.get(command, ()):
        texts = {*_TEXTS, *([""] if action.default != "" else []), "x"} - starts_work
        yield from (case(option_with(text), message=message) for text in sorted(texts))
        if "x" in texts:
            yield case(f"--{name}", "x", message=message)
    else:
        yield from (case(option_with(value), **maybe_valid) for value in ("", *_TEXTS))
        yield case(option_with("a"), option_with("b"), **maybe_valid)
