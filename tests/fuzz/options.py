"""Invalid values of every option of every command, from the commands' parsers."""

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


class _Seen(BaseException):
    """Carries the parser of a command out of its `main`."""


def options_of(command: str) -> list[argparse.Action]:
    """Returns all options of a command, from its own parser."""

    def stop(parser, arguments):
        raise _Seen(parser)

    with mock.patch.object(command_line.Parser, "parse", stop):
        try:
            main_of(command)([])
        except _Seen as seen:
            return [a for a in seen.args[0]._actions if a.option_strings and a.dest != "help"]
    raise AssertionError(f"{command} parses no options")


# Valid texts of options: they start work, often of minutes, and are not tried.
_STARTS_WORK = {
    **dict.fromkeys(
        [
            f"experiments.studies.{study} runs"
            for study in "depth_8 head_diversity language_models long_rows small_caches".split()
        ],
        frozenset(("../x", "a\x01b", SNOWMAN, FOLDER, MISSING, "x")),
    ),
    "experiments.benchmarks.train_benchmark set": {""},
    "experiments.studies.set_anomaly features": {""},
    "kvjax.compare scores": {FOLDER},  # has no evaluation yet
    "kvjax.data.prepare source": {FILE},
}
_NAMED_AS = {
    "runs": "--workdir",
    "set": "--config",
    "python": "--peers",
}  # options that messages name by another option
# Options with arbitrary or empty text; the text of other options must name something that exists.
_FREE = {
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
_WHOLE = (HUGE, "0", "1000000000", "1000000000000")
_NO_INTEGER = ("", "x", "1.5", "-1", "nan", "inf", SNOWMAN, NO_UTF8, "1,2", "-" + HUGE)
_NO_NUMBER = ("", "x", "-1", "nan", "inf", "-inf", SNOWMAN, NO_UTF8)
_FILES = ("/dev/null", PIPE, FOLDER, FILE, MISSING)
_TEXTS = (LONG, "../x", "a\x01b", SNOWMAN, NO_UTF8, SURROGATE, *_FILES)


def option_cases(command: str) -> Iterator[Case]:
    """Yields every option of a command without a value, with invalid values and misspelt."""
    working, prints = WORKING.get(command, ((), ""))

    def case(*given, **known):
        return Case(command=command, arguments=(*working, *given), **dict(status=(2,)) | known)

    if prints:
        yield case(status=(0,), prints=prints)
    yield case("extra", says=("extra",))
    yield case("--no_such", says=("no_such",))
    yield case(SNOWMAN, says=(SNOWMAN,))
    yield case(NO_UTF8, says=("udcff", "?"))
    yield case("--", "x", says=("x",))
    yield case("-x", says=("-x",))
    if command not in ("kvjax.main", "kvjax.costs", "kvjax.aot"):
        yield case("--config.train.seed=1", says=("config.train.seed",))
    for action in options_of(command):
        option = action.option_strings[0]
        name = option.removeprefix("--")
        yield case(f"{option}x=1", says=(f"{name}x",))
        yield case(f"{option[:-1]}=1", says=(option[:-1],))
        if isinstance(action, argparse._VersionAction):
            yield case(option, status=(0,), prints="kvjax")
        elif action.nargs == 0:
            yield case(f"{option}=x", says=(name,))
            yield case(option, "x", says=("x", name))
        elif action.nargs == "?":  # a value may be left away
            yield from _value_cases(command, action, case, name)
        else:
            yield case(option, says=(name,))
            yield from _value_cases(command, action, case, name)


def _value_cases(command: str, action: argparse.Action, case, name: str) -> Iterator[Case]:
    def option_with(value):
        return f"--{name}={value}"

    says = (name, name.replace("_", " "), _NAMED_AS.get(name, name))
    starts_work = _STARTS_WORK.get(f"{command} {name}", set())
    doubtful = dict(says=says, status=(0, 1, 2) if command == "kvjax.aot" else (0, 2))
    kind = {int: (_NO_INTEGER, _WHOLE), float: (_NO_NUMBER, ("1e300", "0"))}.get(action.type)
    if name == "config":
        return
    if kind:
        wrong, odd = kind
        yield from (case(option_with(value), says=says) for value in wrong)
        if command in PRODUCT:
            yield from (case(option_with(value), **doubtful) for value in odd)
    elif action.choices or name not in _FREE.get(command, ()):
        texts = {*_TEXTS, *([""] if action.default != "" else []), "x"} - starts_work
        yield from (case(option_with(text), says=says) for text in sorted(texts))
        if "x" in texts:
            yield case(f"--{name}", "x", says=says)
    else:
        yield from (case(option_with(value), **doubtful) for value in ("", *_TEXTS))
        yield case(option_with("a"), option_with("b"), **doubtful)
