"""The cases: every option of every command and every key of six configs, with what cannot be.

Options are those that a command's own parser has, and keys those that a config has, so that a new
one is tried the day it is there.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import re
from unittest import mock

from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import load_config
from tests.fuzz.case import FORKED
from tests.fuzz.case import STARTED
from tests.fuzz.case import Case
from tests.fuzz.case import main_of

CONFIGS = ("lrkv_tiny", "mla_tiny", "mla_paper_tiny", "kv_tied_tiny", "qk_tied_plus_tiny")
CONFIGS += ("thin_keys_tiny",)
PRODUCT = ("kvjax", "kvjax.main", "kvjax.generate", "kvjax.costs", "kvjax.aot")
PRODUCT += ("kvjax.data.prepare", "kvjax.kernels.profile")
CHILDREN = ("jax_training", "torch_training")  # of train_benchmark: not for users
EXPERIMENTS = tuple(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if "__main__" in path.read_text() and path.stem not in CHILDREN
)

MISSING, FOLDER, FILE = "../shared/missing", "folder", "notes.txt"
LONG, NO_UTF8, SURROGATE, SNOWMAN = "x" * 1000, "\udcff", "\ud800", "\u2603"
HUGE = str(2**63)
EMPTY = ""

RUN = (  # arguments of kvjax.main with which a config is trained on a small text
    *("--workdir=run", "--config.data.source=../shared/text.txt"),
    *("--config.data.directory=../shared/data", "--config.data.tokenizer=byte"),
    *("--config.data.vocab_size=257", "--config.data.sequence_length=32"),
)
# For each command, arguments with which it does something, and what it prints then.
WORKING = {
    "kvjax": ((), "Commands"),
    "kvjax.main": (RUN, "would train"),
    "kvjax.generate": (("--workdir=../shared/trained", "--prompt=a"), "would generate"),
    "kvjax.costs": ((), "Parameters"),
    "kvjax.aot": (("--topology=v5e:2x2",), "would compile"),
    "kvjax.data.prepare": (
        ("--source=../shared/text.txt", "--tokenizer=byte", "--output=out", "--sequence_length=32"),
        "datasets",
    ),
    "kvjax.kernels.profile": ((), "would measure"),
}


def config_file(name: str) -> str:
    return f"--config={ROOT / 'configs' / name}.py"


# -- options ---------------------------------------------------------------------------------------


class _Seen(BaseException):
    """The parser of a command."""


def options_of(command: str) -> list[argparse.Action]:
    """All options of a command, from its own parser."""

    def stop(parser, arguments):
        raise _Seen(parser)

    with mock.patch.object(command_line.Parser, "parse", stop):
        try:
            main_of(command)([])
        except _Seen as seen:
            return [a for a in seen.args[0]._actions if a.dest != "help"]
    raise AssertionError(f"{command} parses no options")


# Text that an option may be, and that starts work of minutes: not tried.
_STARTS_WORK = {
    "experiments.studies.tiny_comparison runs": {
        LONG,
        "../x",
        "a\x01b",
        SNOWMAN,
        FOLDER,
        MISSING,
        "x",
    },
    "experiments.benchmarks.train_benchmark set": {""},
    "kvjax.data.prepare source": {FILE},
}
_SAID_AS = {"runs": "--workdir", "set": "--config"}  # keys of these, to the module below
# Options whose text may be anything, or be empty: all other text has to be something that is there.
_FREE = {
    "kvjax.main": ("workdir", "coordinator"),
    "kvjax.generate": ("prompt", "stop", "prompt_file", "dtype", "implementation", "workdir"),
    "kvjax.aot": ("output",),
    "kvjax.data.prepare": ("validation_source", "text_key", "output"),
    "kvjax.kernels.profile": ("plot",),
}
_WHOLE = (HUGE, "0", "1000000000", "1000000000000")
_NO_INTEGER = ("", "x", "1.5", "-1", "nan", "inf", SNOWMAN, NO_UTF8, "1,2", "-" + HUGE)
_NO_NUMBER = ("", "x", "-1", "nan", "inf", "-inf", SNOWMAN, NO_UTF8)
_TEXTS = (LONG, "../x", "a\x01b", SNOWMAN, NO_UTF8, SURROGATE, "/dev/null", FOLDER, FILE, MISSING)


def option_cases(command: str) -> Iterator[Case]:
    """Every option of a command: no value, none of its values, another's name."""
    working, prints = WORKING.get(command, ((), ""))
    of = lambda *given, **known: Case(
        command=command, arguments=(*working, *given), **dict(status=(2,)) | known
    )
    if prints:
        yield of(status=(0,), prints=prints)
    yield of("extra", says=("extra",))
    yield of("--no_such", says=("no_such",))
    yield of(SNOWMAN, says=(SNOWMAN,))
    yield of(NO_UTF8, says=("udcff", "?"))
    yield of("--", "x", says=("x",))
    yield of("-x", says=("-x",))
    if command not in ("kvjax.main", "kvjax.costs", "kvjax.aot"):
        yield of("--config.train.seed=1", says=("config.train.seed",))
    for action in options_of(command):
        option = action.option_strings[0]
        name = option.removeprefix("--")
        yield of(f"{option}x=1", says=(f"{name}x",))
        yield of(f"{option[:-1]}=1", says=(option[:-1],))
        if isinstance(action, argparse._VersionAction):
            yield of(option, status=(0,), prints="kvjax")
        elif action.nargs == 0:
            yield of(f"{option}=x", says=(name,))
            yield of(option, "x", says=("x", name))
        else:
            yield of(option, says=(name,))
            yield from _value_cases(command, action, of, name)


def _value_cases(command: str, action: argparse.Action, of, name: str) -> Iterator[Case]:
    given = lambda value: f"--{name}={value}"
    says = (name, name.replace("_", " "), _SAID_AS.get(name, name))
    starts_work = _STARTS_WORK.get(f"{command} {name}", set())
    doubtful = dict(says=says, status=(0, 1, 2) if command == "kvjax.aot" else (0, 2))
    kind = {int: (_NO_INTEGER, _WHOLE), float: (_NO_NUMBER, ("1e300", "0"))}.get(action.type)
    if name == "config":
        return
    if kind:
        wrong, odd = kind
        yield from (of(given(value), says=says) for value in wrong)
        if command in PRODUCT:
            yield from (of(given(value), **doubtful) for value in odd)
    elif action.choices or name not in _FREE.get(command, ()):
        texts = {*_TEXTS, *([""] if action.default != "" else []), "x"} - starts_work
        yield from (of(given(text), says=says) for text in sorted(texts))
        if "x" in texts:
            yield of(f"--{name}", "x", says=says)
    else:
        yield from (of(given(value), **doubtful) for value in ("", *_TEXTS))
        yield of(given("a"), given("b"), **doubtful)


# -- keys of configs -------------------------------------------------------------------------------

_FREE_KEYS = {  # text that is not one of a few words
    *("name", "data.directory", "data.source", "data.validation_source", "data.text_key"),
    "train.sample_prompt",
}
_MAY_BE_NEGATIVE = {"compute.query_chunk"}
_NEVER_VAST = re.compile("epsilon|base|learning_rate")
_TRAIN_BPE = ("--config.data.tokenizer=bpe", "--config.data.vocab_size=300")


@functools.cache
def leaves(name: str) -> dict[str, object]:
    """The keys of a config, by dotted name."""

    def walk(section, prefix):
        for key, value in section.items():
            if hasattr(value, "items"):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(load_config(ROOT / "configs" / f"{name}.py"), ""))


def key_cases(name: str) -> Iterator[Case]:
    """Every key of a config, with values that cannot be and some that could.

    A key that the first config has too gets only the latter, and only if it tells of the mechanism:
    what cannot be is not a matter of the config.
    """
    first = leaves(CONFIGS[0]) if name != CONFIGS[0] else {}
    for key, value in leaves(name).items():
        if key not in first:
            yield from _cases_of_key(name, key, value)
        elif key.startswith("attention."):
            yield from (c for c in _cases_of_key(name, key, value) if 0 in c.status)


def _cases_of_key(config: str, key: str, value) -> Iterator[Case]:
    last = key.rpartition(".")[2]
    flag, says = f"--config.{key}", (last,)
    of = lambda *given, **known: Case(
        command="kvjax.main",
        arguments=(config_file(config), *RUN, *given),
        **dict(says=says, status=(2,)) | known,
    )
    yield of(f"{flag}x=1", says=(f"{last}x",))
    yield of(f"{flag}.x=1", says=says)
    yield of(f"--no{flag[2:]}=1", says=says)
    wrong, odd = _values(key, value)
    yield from (of(f"{flag}={v}") for v in wrong)
    yield from (of(f"{flag}={v}", status=(0, 2)) for v in odd)
    if not isinstance(value, bool):
        yield of(flag)
        yield of(f"--no{flag[2:]}")
    if isinstance(value, int) and not isinstance(value, bool):
        yield of(flag, "x")
    if key.startswith("data."):
        yield from (of(*_TRAIN_BPE, f"{flag}={v}", status=(0, 2)) for v in odd)


def _values(key: str, value) -> tuple[tuple, tuple]:
    """Values that a key cannot have, and values that it may have."""
    if isinstance(value, bool):
        return ("", "maybe", "2", "nan", NO_UTF8), ("true", "false")
    if isinstance(value, int):
        odd = ("0", "1", "3", "7", "1000000000", "1000000000000")
        negative = () if key in _MAY_BE_NEGATIVE else ("-1",)
        return ("", "x", "1.5", "nan", "inf", HUGE, "-" + HUGE, SNOWMAN, *negative), odd
    if isinstance(value, float):
        vast = ("1e300",) if _NEVER_VAST.search(key) else ()
        return ("", "x", "nan", "inf", "-inf", "-1", NO_UTF8, *vast), ("0", "1e-300", "1e300", "1")
    if isinstance(value, tuple):
        return ("x", "", "(-1,)", "(1.5,)", "('x',)", "(nan,)", "3"), ("()", "(0,)", "(1,2,3,4)")
    if key in _FREE_KEYS:
        return ((SURROGATE, NO_UTF8) if key == "train.sample_prompt" else ()), (EMPTY, *_TEXTS)
    return ("", *_TEXTS, "1", "nan"), ()


def section_cases() -> Iterator[Case]:
    """Sections taken for keys, and keys that are not there."""
    config = (config_file("lrkv_tiny"), *RUN)
    of = lambda *given, **known: Case(
        command="kvjax.main", arguments=(*config, *given), **dict(status=(2,)) | known
    )
    for section in ("train", "data", "model", "attention", "optimizer", "compute", "mesh"):
        yield of(f"--config.{section}=1", says=(section,))
        yield of(f"--config.{section}", says=(section,))
        yield of(f"--config.{section}.=1", says=(section,))
        yield of(f"--config.{section}.nothing=1", says=("nothing",))
        yield of(f"--config.{section}s.x=1", says=(f"{section}s",))
        yield of(f"--noconfig.{section}", says=(section,))
    yield of("--config.=1", says=("config",))
    yield of("--config..=1", says=("config",))
    yield of("--config.num_steps=1", says=("train.num_steps",))
    yield of(f"--config.{SNOWMAN}=1", says=(SNOWMAN,))
    yield of(f"--config.{NO_UTF8}=1", says=("?", "udcff"))
    yield of(f"--config.train.{LONG}=1", says=(LONG,))
    yield of("--config.train.seed=1", "--config.train.seed=x", says=("seed",))
    yield of("--config.train.seed=1", "--config.train.seed=2", status=(0,), prints="would")
    yield of("--config.train.seed", "5", status=(0,), prints="would")
    yield of("--config.train.batch_size=3", "--config.train.grad_accumulation=2", says=("batch",))
    for name in ("", "../x", ".", "..", "/", SNOWMAN, LONG, NO_UTF8, SURROGATE, "a/b"):
        arguments = (*config[:1], *RUN[1:], f"--config.name={name}")
        yield Case(command="kvjax.main", arguments=arguments, says=("name",), prints="would")


# -- files -----------------------------------------------------------------------------------------


def file_cases() -> Iterator[Case]:
    """Configs, workdirs, prompts and texts that are not what they should be."""
    for command in ("kvjax.main", "kvjax.costs", "kvjax.aot"):
        working, _ = WORKING[command]
        of = lambda *given, c=command, w=working, **known: Case(
            command=c, arguments=(*w, *given), **dict(status=(2,)) | known
        )
        files = (
            "binary",
            "raises",
            "ends",
            "wrong",
            "none",
            "a_dict",
            "late",
            "prompts",
            "keyless",
        )
        for name in files:
            yield of(f"--config=../shared/{name}.py", says=(f"{name}.py", "missing", "'data'"))
        for name in ("", ".", "configs", FOLDER, FILE, MISSING, LONG, "lrkv_tiny", "/dev/null"):
            yield of(f"--config={name}", says=("config",))
        for name in (SNOWMAN, NO_UTF8, SURROGATE, "a\x01b", f"{ROOT}/configs", "lrkv_tyni.py"):
            yield of(f"--config={name}", says=("config",))
        yield of("--config", says=("config",))
        yield of("--config", MISSING, says=("missing",))
        yield of(config_file("lrkv_tiny"), config_file("x"), says=("config",))
    yield from _workdir_cases()
    yield from _prompt_cases()
    yield from _text_cases()


_NO_RECORDS = ("\xff\xfe\x00\n", "[]\n", "{}\n", '{"step": "x"}\n', "null\n", "")


def _workdir_cases() -> Iterator[Case]:
    main = lambda *given, **known: Case(
        command="kvjax.main",
        arguments=(config_file("lrkv_tiny"), *RUN[1:], *given),
        **dict(says=("workdir",)) | known,
    )
    text = lambda workdir, **known: Case(
        command="kvjax.generate", arguments=(f"--workdir={workdir}", "--prompt=a"), **known
    )
    schemes = ("gs://b/x", "s3://b/x", "hdfs://x", "no://x", "://", "http://localhost:1/x")
    for workdir in ("", FILE, f"{FILE}/x", "/proc/x", "/dev/null", "/dev/null/x", *schemes, LONG):
        where = tuple(filter(None, (workdir[:20], workdir.partition("://")[0], "workdir")))
        if workdir:
            yield main(f"--workdir={workdir}", says=where, status=(2,))
        yield text(workdir, says=where, status=(2,))
    for path in (FOLDER, SNOWMAN, "a/b/c", "~", f"{FOLDER}/", "gs:/x"):
        yield text(path, says=("workdir",), status=(2,))
    trained = dict(scene="trained")
    again = lambda **known: Case(
        command="kvjax.main",
        arguments=("--config=same.py", "--workdir=run", "--config.train.sample_tokens=0"),
        **trained | dict(talks=True) | known,
    )
    same = ("same.py", _SAME)
    yield again(edits=(same,), status=(0,), prints="validation")
    for name in ("metrics.jsonl", "timing.jsonl", "config.json", "dataset.json", "tokenizer.json"):
        for content in (*_NO_RECORDS, "/", None):
            says = (name, "holds another run")
            yield again(edits=(same, (f"run/{name}", content)), says=says)
        torn = (f"run/{name}", '{"step": 1}\n{"st')
        yield again(edits=(same, torn), says=(name,), loses=(f"case/{torn[0]}",))
        if name in ("config.json", "tokenizer.json"):
            for content in (*_NO_RECORDS, "/", None, '{"train": ' * 100_000):
                edits = ((f"run/{name}", content),)
                yield text("run", edits=edits, says=(name,), status=(2,), **trained)
    yield text("run", edits=(("run/checkpoints", None),), says=("run",), status=(2,), **trained)
    yield text("run", edits=(("run/checkpoints", "x"),), says=("run",), status=(2,), **trained)
    yield main("--workdir=run", status=(2,), says=("run",), **trained)


_SAME = """
from tests import runs

def get_config():
    config = runs.small_config("../shared/text.txt", "../shared/data", num_steps=2, eval_rows=8)
    config.data.update(tokenizer="byte", vocab_size=257, sequence_length=32)
    config.train.update(batch_size=2, checkpoint_every=1)
    return config
"""


def _prompt_cases() -> Iterator[Case]:
    of = lambda *given, **known: Case(
        command="kvjax.generate",
        arguments=("--workdir=../shared/trained", *given),
        **dict(status=(2,)) | known,
    )
    yield of(says=("prompt",))
    for file in ("", FOLDER, MISSING, "../shared/empty.txt", "../shared/latin.txt", "no://x", LONG):
        yield of(f"--prompt_file={file}", says=("prompt",))
    for content in ("", "\n", "a\n\nb\n", "\xff\xfe", "a\0b\n"):
        yield of("--prompt_file=-", stdin=content, says=("standard input", "line"), status=(0, 2))
    yield of("--prompt_file=-", stdin="a\nb\n", status=(0,), prints="would")
    yield of("--prompt=a", "--num_tokens=0", says=("num_tokens",))
    yield of("--prompt=a", "--top_p=0", says=("top_p",))
    yield of("--prompt=a", "--temperature=nan", says=("temperature",))
    yield of("--prompt=a", "--stop_token=257", says=("stop", "257"))
    yield of("--prompt=a", "--step=3", says=("step",))
    yield of("--prompt=a", "--chips=3000", says=("chips",))
    yield of("--prompt=abcdefgh", "--capacity=2", says=("capacity",))
    yield of("--prompt=a", "--seed=4294967296", says=("seed",))
    yield of("--prompt=a", "--dtype=float16", says=("dtype",))
    yield of("--prompt=a", "--implementation=tpu", says=("implementation",))


def _text_cases() -> Iterator[Case]:
    """Texts for prepare; and prepared data of which something is gone."""
    of = lambda *given, **known: Case(
        command="kvjax.data.prepare",
        arguments=("--tokenizer=byte", "--output=out", "--sequence_length=32", *given),
        **dict(status=(2,)) | known,
    )
    files = ("empty.txt", "latin.txt", "deep.jsonl", "binary.py", "a_file", "data", "missing.txt")
    for name in files:
        yield of(f"--source=../shared/{name}", says=(name, "source"))
    for name in (
        ",",
        " ",
        "*.nothing",
        "no://x",
        "gs://b/x.txt",
        "tfds:",
        "tfds:no_such",
        "tfds:#",
    ):
        yield of(f"--source={name}", says=(name, "source"))
    text = "--source=../shared/text.txt"
    yield of("--source=../shared/marked.txt", status=(0,), prints="datasets")
    yield of(text, f"--validation_source={MISSING}.txt", says=("validation_source",))
    yield of(text, "--sequence_length=99999999999", says=("sequence_length",))
    yield of(text, "--sequence_length=1000000", says=("sequence_length",))
    yield of(text, f"--output={FILE}", says=(FILE, "output"))
    yield of(text, "--output=/proc/x", says=("/proc/x", "output"))
    yield of(text, "--output=gs://b/x", says=("gs://", "output"))
    yield of(text, "--tokenizer=../shared/missing.json", says=("missing.json", "tokenizer"))
    yield of(text, "--tokenizer=bpe", "--vocab_size=100000", says=("vocab_size",))
    main = lambda *given, **known: Case(
        command="kvjax.main",
        arguments=(config_file("lrkv_tiny"), *RUN, "--config.data.source=prepared:p", *given),
        **dict(says=("p",), status=(2,)) | known,
    )
    for content in (*_NO_RECORDS, "[" * 100_000, "/", None):
        yield main(edits=(("p/dataset.json", content),))


# -- processes of their own ------------------------------------------------------------------------


def process_cases() -> Iterator[Case]:
    """Real streams, environments and signals."""
    commands = {
        "kvjax": (),
        "kvjax.costs": (),
        "kvjax.main": ("--help",),
        "kvjax.data.prepare": WORKING["kvjax.data.prepare"][0],
        "kvjax.generate": ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=3"),
    }
    for command, arguments in commands.items():
        of = lambda c=command, a=arguments, **known: Case(
            command=c, arguments=a, **dict(how=FORKED, status=(0,)) | known
        )
        yield of()
        yield of(stdout="head", status=(0, 1))
        yield of(stdout="shut", status=(1,))
        yield of(stdout="full", status=(2,), says=("space",))
        yield of(stdout="closed")
        yield of(stderr="closed")
        if command == "kvjax.generate":  # which compiles: the others tell of the rest
            continue
        yield of(stdin="closed")
        yield of(stderr="full")
        yield of(environment=dict(PYTHONIOENCODING="ascii"))
        wrong = (f"--no_{SNOWMAN}",)
        for stream in ("closed", "full"):
            yield dataclasses.replace(of(stderr=stream), arguments=wrong, status=(2,))
            yield dataclasses.replace(
                of(stdout=stream), arguments=wrong, status=(2,), says=("no_",)
            )
    yield from _environment_cases()
    yield from _interrupted_cases()


def _environment_cases() -> Iterator[Case]:
    train = (config_file("lrkv_tiny"), *RUN)
    text = ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=2")
    nowhere = dict(how=STARTED, environment=dict(JAX_PLATFORMS="nope"), status=(2,), says=("nope",))
    yield Case(command="kvjax.main", arguments=train, **nowhere)
    yield Case(command="kvjax.generate", arguments=text, **nowhere)
    yield Case(command="kvjax.kernels.profile", **nowhere)
    for command in ("kvjax.costs", "kvjax.aot"):
        arguments = WORKING[command][0]
        known = nowhere | dict(status=(0, 2), says=("nope", "libtpu"))
        yield Case(command=command, arguments=arguments, **known)
    file = dict(environment=dict(KVJAX_CACHE=FILE), says=("KVJAX_CACHE", FILE))
    home = (config_file("lrkv_tiny"), *RUN[:2], *RUN[3:])
    yield Case(command="kvjax.main", arguments=home, status=(2,), **file)
    prepare = ("--source=../shared/text.txt", "--tokenizer=byte")
    yield Case(command="kvjax.data.prepare", arguments=prepare, status=(2,), **file)
    plain = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    for command, arguments in {"kvjax.costs": (), "kvjax": ()}.items():
        yield Case(
            command=command, arguments=arguments, how=STARTED, environment=plain, status=(0,)
        )
    plain = dict(how=STARTED, environment=plain)
    yield Case(command="kvjax.main", arguments=(f"--{SNOWMAN}",), status=(2,), **plain)
    for key, value in dict(NUM_PROCESSES="x", PROCESS_ID="-1", COORDINATOR="here").items():
        name = f"KVJAX_{key}"
        environment = {name: value}
        says = (name, key.lower())
        yield Case(command="kvjax.main", arguments=train, environment=environment, says=says)
    for given, said in {
        ("--coordinator=h:1",): "num_processes",
        ("--coordinator=h", "--num_processes=2", "--process_id=0"): "coordinator",
        ("--coordinator=h:1", "--num_processes=0", "--process_id=0"): "num_processes",
        ("--coordinator=h:1", "--num_processes=2", "--process_id=2"): "process_id",
        ("--coordinator=h:99999", "--num_processes=2", "--process_id=1"): "coordinator",
        ("--connect_seconds=0",): "connect_seconds",
        ("--heartbeat_seconds=-1",): "heartbeat_seconds",
    }.items():
        yield Case(command="kvjax.main", arguments=(*train, *given), says=(said,), status=(2,))


def _interrupted_cases() -> Iterator[Case]:
    """Ctrl-C while it imports, in its first second, and later; it may have ended before."""
    shapes = ("--mechanisms=lrkv", "--batch=1", "--length=1024", "--rounds=1", "--milliseconds=5")
    commands = {
        "kvjax.main": (config_file("lrkv_tiny"), *RUN),
        "kvjax.generate": ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=9999"),
        "kvjax.costs": ("--all",),
        "kvjax.aot": ("--topology=v5e:2x2",),
        "kvjax.data.prepare": ("--source=embedded", "--output=out"),
        "kvjax.kernels.profile": shapes,
    }
    for command, arguments in commands.items():
        of = lambda c=command, a=arguments, **known: Case(
            command=c, arguments=a, **dict(status=(130,)) | known
        )
        yield of(how=STARTED, interrupt=0.0)
        short = dict(status=(130, 0, 2)) if command in ("kvjax.aot", "kvjax.costs") else {}
        yield of(how=FORKED, interrupt=0.05, **short)
        if command != "kvjax.aot":
            yield of(how=FORKED, interrupt=0.8, **short)


GROUPS = {
    **{f"options of {command}": (option_cases, command) for command in (*PRODUCT, *EXPERIMENTS)},
    **{f"keys of {name}": (key_cases, name) for name in CONFIGS},
    "sections": (section_cases,),
    "files": (file_cases,),
    "processes": (process_cases,),
}


def cases_of(group: str) -> list[Case]:
    """The cases of a group, each once."""
    make, *given = GROUPS[group]
    return list({repr(case): case for case in make(*given)}.values())
