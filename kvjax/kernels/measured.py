"""Decode attention timed on the device that is present: rows of a table, and block sizes."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import inspect
import itertools
import sys

import jax
import jax.numpy as jnp

from kvjax import devices
from kvjax.kernels import contenders
from kvjax.kernels import timing
from kvjax.kernels.decode_attention import bodies
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS

BLOCKS = (256, 512, 1024, 2048, 4096)  # where an implementation's module has no CANDIDATES
NOTHING_FASTER = "nothing is faster than its own block sizes"
_MEMORY = 0.85  # of the device's, for caches
_COPY = ("copy", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What to measure, and how."""

    model: str
    mechanisms: Sequence[str]
    batches: Sequence[int]
    lengths: Sequence[int]
    implementations: Sequence[str]
    rounds: int
    target: float  # seconds by which the longer chain of calls is longer
    device: str | None  # a name of devices.DEVICES, or "cpu"; None: no datasheet of it

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)

    @property
    def on_chip_bytes(self) -> float:
        return timing.ON_CHIP_BYTES.get(self.device, max(timing.ON_CHIP_BYTES.values()))


def measure(run: Run) -> tuple[list[dict], float]:
    """Rows, a mechanism and implementation each, by batch and length; and the copy's bytes/s."""
    copy, copy_bytes = timing.copy(target=run.target)
    rows, copies = [], []
    for batch, length in itertools.product(run.batches, run.lengths):
        new, seconds = _side_by_side(run, batch, length, copy, copy_bytes)
        rows += new
        copies.append(copy_bytes / seconds)
    return rows, timing.spread(copies).median


def _side_by_side(
    run: Run, batch: int, length: int, copy: timing.Sample, copy_bytes: int
) -> tuple[list[dict], float]:
    """Rows of one batch and length, measured in turns; and the copy's seconds among them."""
    problems, rows = _problems(run, batch, length)
    samples = {}
    for (mechanism, problem), name in itertools.product(problems.items(), run.implementations):
        sample = _sample(name, problem, run)
        if isinstance(sample, str):
            rows.append(_names(mechanism, name, batch, length) | dict(why=sample))
        else:
            samples[mechanism, name] = sample
    taken = timing.interleaved({_COPY: copy} | samples, run.rounds)
    copy_seconds = timing.spread(taken.pop(_COPY)).median
    for (mechanism, name), seconds in taken.items():
        names = _names(mechanism, name, batch, length)
        copied = copy_bytes / copy_seconds
        rows.append(names | row(problems[mechanism], seconds, copied=copied, run=run))
    return _speedups(sorted(rows, key=lambda r: _order(r, run))), copy_seconds


def row(problem: contenders.Problem, seconds: Sequence[float], *, copied: float, run: Run) -> dict:
    """Rates of one contender from its seconds per call; logical bytes, each read once."""
    taken = timing.spread(seconds)
    if taken.median <= 0:
        return dict(why="its time drowns in the noise: take more --milliseconds")
    tokens = problem.batch * problem.length
    num_bytes = tokens * shapes.bytes_per_token(problem.shape, problem.dtype)
    rate = num_bytes / taken.median
    datasheet = devices.DEVICES.get(run.device)
    around = len(problem.caches) * num_bytes
    return dict(
        cache_bytes=num_bytes,
        seconds=dataclasses.asdict(taken),
        gbps=rate / 1e9,
        of_datasheet=rate / datasheet.bandwidth if datasheet else None,
        of_copy=rate / copied,
        tflops=tokens * flops_per_token(problem.shape) / taken.median / 1e12,
        caches=len(problem.caches),
        may_stay_on_chip=around < 2 * run.on_chip_bytes,
    )


def flops_per_token(shape: shapes.Shape) -> float:
    """FLOPs of a query's attention to one cached token, as `kvjax.costs` counts them."""
    if isinstance(shape, shapes.Latent):
        return 2 * shape.N * (2 * shape.C + shape.P)
    N, K, H, Hv = shape.N, shape.K, shape.H, shape.Hv
    flops = 2 * N * (H + Hv)
    if isinstance(shape, shapes.Grouped):
        return flops
    flops += 2 * N * shape.R + (N if shape.scaled else 0)
    if not shape.rotated:
        return flops + 2 * N * shape.R
    if N == K:
        return flops + N * bodies.rotating_flops(shape.R, H, shapes.ROPE_BASE)
    return flops + 2 * K * shape.R * H + 4 * K * H


def _names(mechanism: str, implementation: str, batch: int, length: int) -> dict:
    return dict(mechanism=mechanism, implementation=implementation, batch=batch, length=length)


def _order(row: dict, run: Run) -> tuple:
    names = (*run.implementations, "")
    return run.mechanisms.index(row["mechanism"]), names.index(row["implementation"])


def _sample(
    name: str, problem: contenders.Problem, run: Run, **parameters: int
) -> timing.Sample | str:
    """The contender's measurement, or why there is none: one that fails does not end the run."""
    try:
        return contenders.sample(name, problem, target=run.target, **parameters)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        expected = isinstance(error, (NotImplementedError, ImportError))
        return said if expected else f"{type(error).__name__}: {said}"


def _problems(
    run: Run, batch: int, length: int
) -> tuple[dict[str, contenders.Problem], list[dict]]:
    """The mechanisms that fit the device's memory beside each other, and a row for each other."""
    problems, without = {}, []
    left = _MEMORY * timing.memory_bytes()
    for name in run.mechanisms:
        shape = shapes.SHAPES[run.model][name]
        num_bytes = batch * length * shapes.bytes_per_token(shape, run.dtype)
        copies = timing.ring(num_bytes, run.on_chip_bytes)
        layouts = 1 + sum(library in run.implementations for library in contenders.LIBRARIES)
        need = num_bytes * copies * layouts
        if need > left:
            beside = f" beside {', '.join(problems)}" if problems else ""
            why = f"{need / 1e9:.1f} GB do not fit{beside}: {left / 1e9:.1f} GB are left"
            without.append(_names(name, "", batch, length) | dict(why=why))
            continue
        left -= need
        problems[name] = contenders.Problem(
            shape, batch=batch, length=length, dtype=run.dtype, copies=copies
        )
    return problems, without


def _speedups(rows: list[dict]) -> list[dict]:
    """The rows, those with a time beside our first implementation of MHA, if it has one."""
    ours = [
        r["seconds"]["median"]
        for r in rows
        if r["mechanism"] == "mha" and r["implementation"] in IMPLEMENTATIONS and "seconds" in r
    ]
    for r in rows:
        if ours and "seconds" in r:
            r["speedup"] = ours[0] / r["seconds"]["median"]
    return rows


def candidates(implementation: str) -> list[dict[str, int]]:
    """Block sizes to try, none first: the implementation's own; empty where it takes no others.

    An implementation's module may say CANDIDATES: dict(block=(256, 512), ...).
    """
    function = IMPLEMENTATIONS[implementation]
    takes = inspect.signature(function).parameters
    grid = getattr(sys.modules[function.__module__], "CANDIDATES", dict(block=BLOCKS))
    grid = {name: values for name, values in grid.items() if name in takes}
    if not grid:
        return []
    tried = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    return [{}, *tried]


def tune(run: Run) -> list[dict]:
    """The fastest block sizes of our implementations, each shape by itself; saved."""
    found = []
    kind = tuning.current_device_kind()
    ours = [name for name in run.implementations if name in IMPLEMENTATIONS and candidates(name)]
    for batch, length, mechanism in itertools.product(run.batches, run.lengths, run.mechanisms):
        alone = dataclasses.replace(run, mechanisms=(mechanism,), implementations=ours)
        problems, without = _problems(alone, batch, length)
        found += without
        for problem, name in itertools.product(problems.values(), ours):
            names = _names(mechanism, name, batch, length)
            found.append(names | _tuned(problem, name, run, kind))
    return found


def _tuned(problem: contenders.Problem, name: str, run: Run, kind: str) -> dict:
    samples, why = {}, []
    for parameters in candidates(name):
        sample = _sample(name, problem, run, **parameters)
        if isinstance(sample, str):
            why.append(sample)
        else:
            samples[tuple(parameters.items())] = sample
    if not samples:
        return dict(why=why[0])
    medians = {
        parameters: timing.spread(seconds).median
        for parameters, seconds in timing.interleaved(samples, run.rounds).items()
    }
    best = min(medians, key=medians.get)
    facts = dict(seconds=medians[best], by_default=medians.get(()), tried=len(samples))
    if not best:
        return dict(why=NOTHING_FASTER) | facts
    key = tuning.key(name, problem.operands, problem.caches[0])
    tuning.save(key, kind, dict(best), source="measured", **facts)
    return dict(key=key, parameters=dict(best)) | facts


def table(rows: Iterable[Mapping]) -> list[str]:
    """Markdown; a row without a time says why."""
    head = ["mechanism", "by", "batch", "tokens", "us", "from", "to", "GB/s", "of datasheet"]
    head += ["of copy", "TFLOP/s", "MHA's time / its"]
    lines = [f"| {' | '.join(head)} |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    part = lambda x: "" if x is None else f"{x:.0%}"
    for r in rows:
        cells = [r["mechanism"], r["implementation"], f"{r['batch']}", f"{r['length']:,}"]
        if "why" in r:
            cells += [r["why"], *[""] * (len(head) - 5)]
        else:
            cells += [f"{1e6 * s:,.1f}" for s in r["seconds"].values()]
            cells += [f"{r['gbps']:,.1f}" + ("*" if r["may_stay_on_chip"] else "")]
            cells += [part(r["of_datasheet"]), part(r["of_copy"]), f"{r['tflops']:.2f}"]
            cells += [f"{r['speedup']:.2f}" if "speedup" in r else ""]
        lines.append(f"| {' | '.join(cells)} |")
    if any(r.get("may_stay_on_chip") for r in rows):
        lines.append("\n\\* The caches may stay on the chip between calls.")
    return lines
