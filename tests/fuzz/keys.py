"""Invalid values of every key of nine configs; sections in place of keys."""

from collections.abc import Iterator
import functools
import re
import zlib

from kvjax.foundation.command_line import load_config
from tests.fuzz.case import Case
from tests.fuzz.commands import (
    CONFIGS,
    EMPTY,
    HUGE,
    LONG,
    NO_UTF8,
    RUN,
    SNOWMAN,
    SURROGATE,
    config_file,
    config_path,
)
from tests.fuzz.options import _TEXTS

_FREE_KEYS = {  # keys whose text may be anything
    *("name", "data.directory", "data.source", "data.validation_source", "data.text_key"),
    "train.sample_prompt",
}
_MAY_BE_NEGATIVE = {"compute.query_chunk"}
_NEVER_VAST = re.compile("epsilon|base|learning_rate")
_TRAIN_BPE = ("--config.data.tokenizer=bpe", "--config.data.vocab_size=300")


@functools.cache
def leaves(name: str) -> dict[str, object]:
    """Returns the values of a config by dotted key."""

    def walk(section, prefix):
        for key, value in section.items():
            if hasattr(value, "items"):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(load_config(config_path(name)), ""))


def key_cases(name: str) -> Iterator[Case]:
    """Yields every key of a config with invalid and with unusual values.

    Keys that the first config has too get only unusual values, and only in config.attention:
    refusals of invalid values do not depend on the config.
    """
    first_keys = leaves(CONFIGS[0]) if name != CONFIGS[0] else {}
    for key, value in leaves(name).items():
        if key not in first_keys:
            yield from _cases_of_key(name, key, value)
        elif key.startswith("attention."):
            yield from (c for c in _cases_of_key(name, key, value) if 0 in c.status)


def _cases_of_key(config: str, key: str, value) -> Iterator[Case]:
    name = key.rpartition(".")[2]
    flag, message = f"--config.{key}", (name,)

    def case(*given, **known):
        return Case(
            command="kvjax.main",
            arguments=(config_file(config), *RUN, *given),
            **dict(message=message, status=(2,)) | known,
        )

    yield case(f"{flag}x=1", message=(f"{name}x",))
    yield case(f"{flag}.x=1", message=message)
    yield case(f"--no{flag[2:]}=1", message=message)
    wrong, odd = _values(key, value)
    yield from (case(f"{flag}={v}") for v in wrong)
    yield from (case(f"{flag}={v}", status=(0, 2)) for v in odd)
    if not isinstance(value, bool):
        yield case(flag)
        yield case(f"--no{flag[2:]}")
    if isinstance(value, int) and not isinstance(value, bool):
        yield case(flag, "x")
    if key.startswith("data."):
        yield from (case(*_TRAIN_BPE, f"{flag}={v}", status=(0, 2)) for v in odd)


def _two(key: str, *unreadable: str) -> tuple:
    """Returns two of the values, which differ by key: all keys of a type have one parser."""
    start = zlib.crc32(key.encode()) % len(unreadable)
    return (*unreadable[start:], *unreadable[:start])[:2]


def _values(key: str, value) -> tuple[tuple, tuple]:
    """Returns invalid values of a key, and unusual ones that may be valid."""
    if isinstance(value, bool):
        return _two(key, "", "maybe", "2", "nan", NO_UTF8), ("true", "false")
    if isinstance(value, int):
        odd = ("0", "1", "3", "7", "1000000000", "1000000000000")
        negative = () if key in _MAY_BE_NEGATIVE else ("-1",)
        unreadable = _two(key, "", "x", "1.5", "nan", "inf", SNOWMAN)
        return (*unreadable, HUGE, "-" + HUGE, *negative), odd
    if isinstance(value, float):
        vast = ("1e300",) if _NEVER_VAST.search(key) else ()
        unreadable = _two(key, "", "x", NO_UTF8)
        return (*unreadable, "nan", "inf", "-inf", "-1", *vast), ("0", "1e-300", "1e300", "1")
    if key == "optimizer.tuned":  # "x" is in "expand"
        return ("(-1,)", "(1.5,)", "('nothing',)", "(nan,)", "3"), ("()", "x", EMPTY)
    if key in ("train.parent", "train.teacher"):
        return (*_TEXTS, "1", "nan"), (EMPTY,)
    if isinstance(value, tuple):
        return ("x", "", "(-1,)", "(1.5,)", "('x',)", "(nan,)", "3"), ("()", "(0,)", "(1,2,3,4)")
    if key in _FREE_KEYS:
        return ((SURROGATE, NO_UTF8) if key == "train.sample_prompt" else ()), (EMPTY, *_TEXTS)
    return ("", *_TEXTS, "1", "nan"), ()


def section_cases() -> Iterator[Case]:
    """Yields sections in place of keys, and unknown keys."""
    config = (config_file("lrkv_tiny"), *RUN)

    def case(*given, **known):
        return Case(command="kvjax.main", arguments=(*config, *given), **dict(status=(2,)) | known)

    for section in ("train", "data", "model", "attention", "optimizer", "compute", "mesh"):
        yield case(f"--config.{section}=1", message=(section,))
        yield case(f"--config.{section}", message=(section,))
        yield case(f"--config.{section}.=1", message=(section,))
        yield case(f"--config.{section}.nothing=1", message=("nothing",))
        yield case(f"--config.{section}s.x=1", message=(f"{section}s",))
        yield case(f"--noconfig.{section}", message=(section,))
    yield case("--config.=1", message=("config",))
    yield case("--config..=1", message=("config",))
    yield case("--config.num_steps=1", message=("train.num_steps",))
    yield case(f"--config.{SNOWMAN}=1", message=(SNOWMAN,))
    yield case(f"--config.{NO_UTF8}=1", message=("?", "udcff"))
    yield case(f"--config.train.{LONG}=1", message=(LONG,))
    yield case("--config.train.seed=1", "--config.train.seed=x", message=("seed",))
    yield case("--config.train.seed=1", "--config.train.seed=2", status=(0,), prints="would")
    yield case("--config.train.seed", "5", status=(0,), prints="would")
    yield case(
        "--config.train.batch_size=3", "--config.train.grad_accumulation=2", message=("batch",)
    )
    for name in ("", "../x", ".", "..", "/", SNOWMAN, LONG, NO_UTF8, SURROGATE, "a/b"):
        arguments = (*config[:1], *RUN[1:], f"--config.name={name}")
        yield Case(command="kvjax.main", arguments=arguments, message=("name",), prints="would")
