"""Closed, full or shut streams, unusual environments, and signals."""

from collections.abc import Iterator
import dataclasses

from tests.fuzz.case import FORKED, STARTED, Case
from tests.fuzz.commands import FILE, RUN, SNOWMAN, WORKING, config_file


def process_cases() -> Iterator[Case]:
    """Yields cases with real streams, environments and signals."""
    commands = {
        "kvjax": (),
        "kvjax.costs": (),
        "kvjax.main": ("--help",),
        "kvjax.data.prepare": WORKING["kvjax.data.prepare"][0],
        "kvjax.generate": ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=3"),
    }
    for command, arguments in commands.items():

        def case(c=command, a=arguments, **known):
            return Case(command=c, arguments=a, **dict(how=FORKED, status=(0,)) | known)

        yield case()
        yield case(stdout="head", status=(0, 1))
        yield case(stdout="shut", status=(1,))
        yield case(stdout="full", status=(2,), message=("space",))
        yield case(stdout="closed")
        yield case(stderr="closed")
        if command == "kvjax.generate":  # it compiles: other commands cover the other streams
            continue
        yield case(stdin="closed")
        yield case(stderr="full")
        yield case(environment=dict(PYTHONIOENCODING="ascii"))
        wrong = (f"--no_{SNOWMAN}",)
        for stream in ("closed", "full"):
            yield dataclasses.replace(case(stderr=stream), arguments=wrong, status=(2,))
            yield dataclasses.replace(
                case(stdout=stream), arguments=wrong, status=(2,), message=("no_",)
            )
    yield from _analysis_cases()
    yield from _environment_cases()
    yield from _interrupted_cases()


def _analysis_cases() -> Iterator[Case]:
    """Yields reports without a reader, and without a locale or a home."""
    working, _ = WORKING["kvjax.analysis"]

    def case(**known):
        return Case(
            command="kvjax.analysis",
            arguments=(*working, "--reports=projections", "--lengths=8"),
            **dict(how=FORKED) | known,
        )

    yield case(stdout="shut", status=(1,))
    yield case(stdout="full", status=(2,), message=("space",))
    yield case(stdout="closed", stderr="closed", status=(0,))
    home = dict(HOME="/proc/x", MPLCONFIGDIR="/proc/x", LC_ALL="C", PYTHONUTF8="0")
    yield case(how=STARTED, environment=home, status=(0,), prints="written")


def _environment_cases() -> Iterator[Case]:
    train = (config_file("lrkv_tiny"), *RUN)
    text = ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=2")
    nowhere = dict(
        how=STARTED, environment=dict(JAX_PLATFORMS="nope"), status=(2,), message=("nope",)
    )
    yield Case(command="kvjax.main", arguments=train, **nowhere)
    yield Case(command="kvjax.generate", arguments=text, **nowhere)
    yield Case(command="kvjax.kernels.profile", **nowhere)
    for command in ("kvjax.costs", "kvjax.aot"):
        arguments = WORKING[command][0]
        known = nowhere | dict(status=(0, 2), message=("nope", "libtpu"))
        yield Case(command=command, arguments=arguments, **known)
    file = dict(environment=dict(KVJAX_CACHE=FILE), message=("KVJAX_CACHE", FILE))
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
        message = (name, key.lower())
        yield Case(command="kvjax.main", arguments=train, environment=environment, message=message)
    for options, named in {
        ("--coordinator=h:1",): "num_processes",
        ("--coordinator=h", "--num_processes=2", "--process_id=0"): "coordinator",
        ("--coordinator=h:1", "--num_processes=0", "--process_id=0"): "num_processes",
        ("--coordinator=h:1", "--num_processes=2", "--process_id=2"): "process_id",
        ("--coordinator=h:99999", "--num_processes=2", "--process_id=1"): "coordinator",
        ("--connect_seconds=0",): "connect_seconds",
        ("--heartbeat_seconds=-1",): "heartbeat_seconds",
    }.items():
        yield Case(
            command="kvjax.main", arguments=(*train, *options), message=(named,), status=(2,)
        )


def _interrupted_cases() -> Iterator[Case]:
    """Yields Ctrl-C during imports, in the first second and later; a case may end before."""
    shapes = ("--mechanisms=lrkv", "--batch=1", "--length=1024", "--rounds=1", "--milliseconds=5")
    commands = {
        "kvjax.main": (config_file("lrkv_tiny"), *RUN),
        "kvjax.generate": ("--workdir=../shared/trained", "--prompt=a", "--num_tokens=9999"),
        "kvjax.analysis": WORKING["kvjax.analysis"][0],
        "kvjax.costs": ("--all",),
        "kvjax.aot": ("--topology=v5e:2x2",),
        "kvjax.data.prepare": ("--source=embedded", "--output=out"),
        "kvjax.kernels.profile": shapes,
    }
    for command, arguments in commands.items():

        def case(c=command, a=arguments, **known):
            return Case(command=c, arguments=a, **dict(status=(130,)) | known)

        yield case(how=STARTED, interrupt=0.0)
        short = dict(status=(130, 0, 2)) if command in ("kvjax.aot", "kvjax.costs") else {}
        yield case(how=FORKED, interrupt=0.05, **short)
        if command != "kvjax.aot":
            yield case(how=FORKED, interrupt=0.8, **short)
