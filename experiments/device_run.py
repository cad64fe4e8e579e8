"""Measures a GPU in ten minutes, with programs that were compiled beforehand on another machine.

    python -m experiments.device_run --make --device=h200        # on a machine without the GPU
    python -m experiments.device_run --run --deadline=570        # on the GPU
    python -m experiments.device_run --table                     # prints the rows' table again

--make compiles kernels and decode steps for the device into build/device/DEVICE, except programs
that the folder already has from the same sources. (cuDNN's kernels and training can be compiled on
the GPU alone.) --run measures in stages: memory, agreement of kernels with the definition, XLA's
options for a whole decode step, kernels, decode steps, training. Each stage is a process that gets
a share of the deadline, and appends its rows to --rows one by one; a stage is skipped if no time is
left. If a program cannot be loaded, it is compiled on the GPU, and a note says why. At the end
--run prints a table; its status is 1 if a kernel disagrees or a stage was stopped.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from experiments import d36, prepared
from experiments.benchmarks import model_decode_benchmark as steps_lib, runner
from experiments.benchmarks.model_decode_benchmark import Point, Stepper
from kvjax.foundation import command_line, provenance, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets, topology
from kvjax.kernels.profile import agreement, measured, side_by_side, timing
from kvjax.kernels.profile.measured import Run

_ROUND_BANDWIDTH = 4e12  # bytes/s; determines only the length of rounds
_GRACE = 5.0  # seconds before the deadline in which the table is printed

# XLA's options for a whole step; they show whether the host or the device limits its time.
FLAGS: dict[str, dict[str, object]] = {
    "default": {},
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "small_command_buffers": {"xla_gpu_graph_min_graph_size": 1},
    "pdl": {"xla_gpu_enable_pdl": True, "xla_gpu_enable_pdl_launch": True},
    "no_merged_products": {"xla_gpu_dot_merger_threshold_mb": 0},
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The measurements of a device.

    Attributes:
      device: a name of `topology.GPUS`, or "cpu" for a rehearsal.
      points: (batch, length) of kernels, the most important first.
      checked: (batch, length) at which kernels are compared with the definition.
      steps: (mechanism, batch, length) of decode steps, the most important first.
      flagged: the decode step that is measured with each of `flags`, keys of FLAGS.
    """

    device: str
    model: str
    implementation: str
    libraries: tuple[str, ...]
    mechanisms: tuple[str, ...]
    points: tuple[tuple[int, int], ...]
    checked: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, int, int], ...]
    flagged: tuple[str, int, int]
    flags: tuple[str, ...]
    layers: int
    rounds: int
    train: tuple[str, ...]  # options of train_benchmark

    def run(self, load: side_by_side.Load = side_by_side.not_stored, **changes) -> Run:
        """Returns the options of a kernel measurement."""
        options = dict(
            model=self.model,
            mechanisms=self.mechanisms,
            points=self.points,
            implementations=(self.implementation, *self.libraries),
            rounds=self.rounds,
            target=0.02,
            device=self.device,
            bandwidth=_ROUND_BANDWIDTH,
            load=load,
        )
        return Run(**options | changes)

    def point(self, name: str, batch: int, length: int) -> Point:
        stepper = Stepper(d36.model(name, self.layers), self.implementation)
        return Point(stepper, batch, length, steps=16 if self.device != "cpu" else 2)


def _gpu(device: str) -> Plan:
    steps = itertools.product(((4, 32_768), (1, 32_768)), ("LRKV", "MHA", "GQA-6", "MLA"))
    train = "--config=configs/lrkv_128m.py --config=configs/mha_128m.py --rows=32"
    return Plan(
        device=device,
        model="d36",
        implementation="gpu",
        libraries=("cudnn",),
        mechanisms=(
            *("mha", "gqa", "lrkv", "lrkv_no_rope", "mla", "lrkv_gqa"),
            *("mha_int8", "gqa_int8", "lrkv_int8", "mla_int8"),
        ),
        points=((8, 32_768), (1, 32_768), (1, 4096), (1, 131_072), (32, 32_768)),
        checked=((8, 4096), (1, 32_768)),
        steps=tuple((name, *point) for point, name in steps),
        flagged=("LRKV", 4, 32_768),
        flags=tuple(FLAGS),
        layers=36,
        rounds=7,
        train=(*train.split(), "--set=compute.remat=none compute.attention=cudnn"),
    )


PLANS = {device: _gpu(device) for device in ("h100", "h200")} | {
    "cpu": Plan(
        device="cpu",
        model="d12",
        implementation="xla",
        libraries=(),
        mechanisms=("mha", "lrkv"),
        points=((1, 256),),
        checked=((2, 128),),
        steps=(("LRKV", 1, 128),),
        flagged=("MHA", 1, 128),
        flags=("default",),
        layers=1,
        rounds=2,
        train=("--config=configs/lrkv_tiny.py", "--steps=1", "--rows=1"),
    )
}

# -- programs --------------------------------------------------------------------------------------


def programs(plan: Plan) -> Iterator[tuple[tuple, Callable[[], side_by_side.Program], dict]]:
    """Yields key, maker and XLA's options of each program, the most important first."""
    run = plan.run(implementations=(plan.implementation,))
    for key in plan.flags:
        point = plan.point(*plan.flagged)
        make = functools.partial(point.stepper.program, point.batch, point.capacity)
        yield ("flags", key, *plan.flagged), make, FLAGS[key]
    for point in plan.checked:
        for key, make in agreement.programs(run, *point).items():
            yield ("check", *key), make, {}
    for batch, length in plan.points:
        setups = measured.setups(run, batch, length, _ROUND_BANDWIDTH)
        for key, make in measured.programs(run, setups).items():
            yield ("kernels", *key), make, {}
    for name, batch, length in plan.steps:
        point = plan.point(name, batch, length)
        make = functools.partial(point.stepper.program, point.batch, point.capacity)
        yield ("steps", name, batch, length), make, {}


def _make(plan: Plan, folder: prepared.Folder, out: Output) -> int:
    device = None if plan.device == "cpu" else topology.gpu_device(plan.device)
    size = failures = 0
    for key, make, options in programs(plan):
        entry = folder.add(key, make, device, **options)
        size += entry.get("bytes", 0)
        failures += "why" in entry
        figures = entry.get("why") or f"{entry['bytes'] / 1e6:.2f} MB, {entry['seconds']:.0f} s"
        out.say(f"{prepared.name_of(key)}: {figures}")
    out.say(f"{folder.path}: {size / 1e6:.1f} MB")
    return 1 if failures else 0


# -- stages ----------------------------------------------------------------------------------------

Rows = Callable[[dict], None]  # stores a row; a stage's last argument is the folder of the rows


def _with(stage: str, plan: Plan, load: side_by_side.Load) -> side_by_side.Load:
    """Returns a function from (mechanism, implementation, ...) to a program; None for libraries."""
    return lambda key: None if key[1] in plan.libraries else load((stage, *key))


def _memory(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    """Measures the rates of a copy and of a sum, which only reads."""
    copy, num_bytes = timing.copy(target=0.05)
    array = jnp.zeros(num_bytes // 8, jnp.int32)

    def make(rounds: int):
        @jax.jit
        def run(x):
            return jax.lax.fori_loop(0, rounds, lambda _, total: total + jnp.sum(x + total), 0)

        return lambda: run(array)

    samples = dict(copy=copy, read=timing.slope(make, 1, target=0.05))
    seconds = {
        name: timing.spread(measured).median
        for name, measured in timing.interleaved(samples, 5).items()
    }
    rates = dict(
        copy_gbps=num_bytes / seconds["copy"] / 1e9, read_gbps=array.nbytes / seconds["read"] / 1e9
    )
    keep(dict(device=jax.devices()[0].device_kind) | rates)


def _check(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    for point in plan.checked:
        names = dict(points=(point,), implementations=(plan.implementation,))
        agreement.check(plan.run(_with("check", plan, load), **names), keep)


def _kernels(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    for point in plan.points:
        measured.measure(plan.run(_with("kernels", plan, load), points=(point,)), keep)


def _step(plan: Plan, key: tuple, options: dict, load: side_by_side.Load) -> dict:
    """Measures a decode step; `key` ends with mechanism, batch and length."""
    point = plan.point(*key[-3:])
    if not point.fits(timing.memory_bytes()):
        return dict(why="it does not fit")

    def program() -> jax.stages.Compiled:
        stored = load(key)
        if stored is not None:
            return stored
        step, arguments = point.stepper.program(point.batch, point.capacity)
        return step.lower(*arguments).compile(compiler_options=options or None)

    return point.read | point.measure(program, plan.rounds)


def _flags(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    for name in plan.flags:
        figures = _step(plan, ("flags", name, *plan.flagged), FLAGS[name], load)
        keep(_named(plan.flagged) | dict(options=name) | figures)


def _steps(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    for point in plan.steps:
        keep(_named(point) | _step(plan, ("steps", *point), {}, load))


def _named(point: tuple[str, int, int]) -> dict:
    return dict(zip(("mechanism", "batch", "length"), point, strict=True))


def _training(plan: Plan, load: side_by_side.Load, keep: Rows, out: pathlib.Path) -> None:
    """Times training; keeps the results of XLA's autotuner for the next run."""
    tuned = out / "autotune"
    flags = f"--xla_gpu_per_fusion_autotune_cache_dir={tuned}" if plan.device != "cpu" else ""
    environment = os.environ | dict(XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip())
    tuned.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "experiments.benchmarks.train_benchmark", "--json"]
    done = subprocess.run(
        [*command, *plan.train], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    keep(json.loads(done.stdout) if done.stdout else dict(why=f"status {done.returncode}"))


STAGES: dict[str, tuple[float, Callable]] = {  # share of the deadline, and function
    "memory": (0.04, _memory),
    "check": (0.1, _check),
    "flags": (0.16, _flags),
    "kernels": (0.28, _kernels),
    "steps": (0.2, _steps),
    "training": (0.22, _training),
}


def _stage(name: str, plan: Plan, folder: pathlib.Path, rows: pathlib.Path) -> None:
    """Measures one stage in this process, and appends its rows.

    Raises:
      UserError: this machine's device is not the plan's.
    """
    runtime.start()
    known = datasheets.for_device(jax.devices()[0])
    present = known.name if known else jax.default_backend()
    if present != plan.device:
        raise UserError(f"--device={plan.device}: this machine has {present}")

    def keep(row: Mapping) -> None:
        _append(rows, dict(stage=name, **row))

    def note(program: str, why: str) -> None:
        keep(dict(program=program, compiled_here=why))

    programs = prepared.Folder(folder, prepared.source_digest(ROOT), note)
    STAGES[name][1](plan, programs.load, keep, rows.parent)


def _append(rows: pathlib.Path, row: dict) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _run(options: argparse.Namespace, rows: pathlib.Path) -> None:
    """Runs each stage as a process, for its share of the deadline and time left over."""
    start, planned = time.monotonic(), 0.0
    made_by = provenance.software("jax-cuda13-plugin")
    _append(rows, dict(stage="run", device=options.device, made_by=made_by))
    for name, (share, _) in STAGES.items():
        planned += share
        seconds = planned * (options.deadline - _GRACE) - (time.monotonic() - start)
        if seconds < share * options.deadline / 4:
            _append(rows, dict(stage=name, skipped=f"{seconds:.0f} s were left"))
            continue
        command = [sys.executable, "-m", "experiments.device_run", f"--stage={name}"]
        command += [f"--device={options.device}", f"--folder={options.folder}", f"--rows={rows}"]
        if why := _stopped(command, seconds):
            _append(rows, dict(stage=name, stopped=why))


def _stopped(command: Sequence[str], seconds: float) -> str:
    """Runs a command, and kills all its processes after `seconds`; returns why it failed, or ""."""
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # its children too, or they hold the card
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"status {status}" if status else ""


# -- tables ----------------------------------------------------------------------------------------


def _show(plan: Plan, rows: Sequence[dict], out: Output) -> None:
    """Prints the rows of all stages, then notes on stopped stages and recompiled programs."""
    by_stage: dict[str, list[dict]] = {name: [] for name in ("run", *STAGES)}
    notes = []
    for row in rows:
        if note := row.get("skipped") or row.get("stopped") or row.get("compiled_here"):
            notes.append(f"{row['stage']} {row.get('program', '')}: {note}".replace(" :", ":"))
        else:
            by_stage[row["stage"]].append(row)
    for row in by_stage["memory"]:
        rates = f"copy {row['copy_gbps']:,.0f} GB/s, read {row['read_gbps']:,.0f} GB/s"
        out.say(f"{row['device']}: {rates}")
        for step in by_stage["flags"] + by_stage["steps"]:
            if "gbps" in step:
                step["of_copy"] = step["gbps"] / row["copy_gbps"]
    if by_stage["check"]:
        out.show(agreement.table(by_stage["check"], plan.run()))
    kernels: list[dict] = []
    for _, at_point in itertools.groupby(by_stage["kernels"], lambda r: (r["batch"], r["length"])):
        kernels += measured.add_public_speedup(list(at_point))
    if kernels:
        out.show(measured.table(kernels, f"kernels on {plan.device}"))
    for stage in ("flags", "steps"):
        if by_stage[stage]:
            options = {"XLA's options": "{options}"} if stage == "flags" else {}
            steps = steps_lib.with_mha(by_stage[stage])
            out.table(*runner.table(options | steps_lib.COLUMNS, steps))
    for result in by_stage["training"]:
        for row in result.get("rows", [result]):
            speed = row.get("why") or f"{row['tokens_per_second']:,.0f} tokens/s"
            mfu = f", MFU {row['mfu']:.1%}" if row.get("mfu") else ""
            out.say(f"training {row.get('config', '')}: {speed}{mfu}")
    for note in notes:
        out.say(f"- {note}")
    out.result(dict(name="device_run", device=plan.device, rows=rows))


def _read(rows: pathlib.Path) -> list[dict]:
    """Returns the rows of a run; the first row names the device."""
    if not os.path.exists(rows):
        raise UserError(f"--rows={rows}: no such file")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    if not found or "device" not in found[0]:
        raise UserError(f"--rows={rows}: no rows of --run")
    return found


def main(arguments: list[str]) -> int:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--make", action="store_true", help="compile for --device, here")
    add("--run", action="store_true", help="measure, on the device")
    add("--table", action="store_true", help="print the rows' table")
    add("--stage", default="", help=f"measure one of {', '.join(STAGES)} alone")
    add("--device", default="h200", help=f"{', '.join(PLANS)}; cpu is a rehearsal (h200)")
    add("--folder", default=str(ROOT / "build/device"), help="folder of programs (build/device)")
    add("--rows", default=str(ROOT / "build/device/rows.jsonl"), help="file of the rows")
    add("--deadline", type=float, default=570.0, help="seconds of --run, up to a day (570)")
    options = parser.parse(arguments)
    if sum((options.make, options.run, options.table, bool(options.stage))) != 1:
        raise UserError("give one of --make, --run, --table and --stage")
    if options.device not in PLANS:
        raise UserError(f"--device={options.device}: must be one of {', '.join(PLANS)}")
    if options.stage and options.stage not in STAGES:
        raise UserError(f"--stage={options.stage}: must be one of {', '.join(STAGES)}")
    between("--deadline", options.deadline, 1.0, 86_400.0)
    plan, rows = PLANS[options.device], pathlib.Path(options.rows)
    folder = pathlib.Path(options.folder) / options.device
    out = Output(options)
    if options.make:
        return _make(plan, prepared.Folder(folder, prepared.source_digest(ROOT)), out)
    if options.run and os.path.exists(rows):
        raise UserError(f"--rows={rows}: has the rows of a run: name another file, or move it")
    if options.run and not os.path.isdir(folder):
        raise UserError(
            f"--folder={options.folder}: no programs of {plan.device}: --make makes them"
        )
    if options.stage:
        _stage(options.stage, plan, folder, rows)
        return 0
    if options.run:
        rows.parent.mkdir(parents=True, exist_ok=True)
        _run(options, rows)
    found = _read(rows)
    _show(PLANS[found[0]["device"]], found, out)
    return 1 if any("stopped" in row or row.get("agrees") is False for row in found) else 0


if __name__ == "__main__":
    command_line.run(main)
