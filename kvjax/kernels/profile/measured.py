"""Times decode attention on the device present: rows of a table, and tile sizes."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import importlib
import inspect
import itertools

import jax
import jax.numpy as jnp

from kvjax.foundation.errors import first_line
from kvjax.foundation.output import Table
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.kernels.profile import contenders, side_by_side, timing
from kvjax.kernels.profile.contenders import LIBRARIES

TILES = (256, 512, 1024, 2048, 4096)  # for implementations whose module has no `candidates`
NOTHING_FASTER = "nothing is faster than the default tile sizes"
NO_MHA = "MHA does not fit beside it"
_MEMORY = 0.85  # share of the device's memory for caches
_COPY, _MHA = " copy", " mha"  # names of the samples that are not contenders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Options of a measurement."""

    model: str
    mechanisms: Sequence[str]
    points: Sequence[tuple[int, int]]  # (batch, length)
    implementations: Sequence[str]
    rounds: int
    target: float  # seconds, see `timing.slope`
    device: str | None  # a name in datasheets.DEVICES, or "cpu"; None: a device without datasheet
    bandwidth: float | None = None  # bytes/s, for the length of rounds; None: a copy's
    load: side_by_side.Load = side_by_side.not_stored

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.device == "cpu" else jnp.bfloat16)

    @property
    def on_chip_bytes(self) -> float:
        return timing.ON_CHIP_BYTES.get(self.device, max(timing.ON_CHIP_BYTES.values()))


OnRow = Callable[[Mapping], None]  # called with every row as soon as it is measured


def measure(run: Run, on_row: OnRow = lambda row: None) -> tuple[list[dict], float]:
    """Returns a row per batch, length, mechanism and implementation, and the bytes/s of a copy."""
    copy, copy_bytes = timing.copy(target=run.target)
    rows, copies = [], []
    for batch, length in run.points:
        point = _Point(run, batch, length, copy, copy_bytes)
        rows += point.measure(on_row)
        copies += point.copies
    return rows, copy_bytes / timing.spread(copies or [copy()]).median


@dataclasses.dataclass(frozen=True)
class _Baseline:
    """Our MHA, with its caches on the device."""

    implementation: str
    sample: timing.Sample
    fallback_reason: str | None  # why our first implementation does not run; None: it does


class _Point:
    """Measures one batch and length.

    A mechanism's contenders are sampled in turns with a copy and our MHA, and freed before the next
    mechanism. If memory cannot hold MHA and the mechanism, MHA is left out. Libraries' MHA is timed
    once, in turns with our MHA.
    """

    def __init__(self, run: Run, batch: int, length: int, copy: timing.Sample, copy_bytes: int):
        self.run, self.batch, self.length = run, batch, length
        self.copy, self.copy_bytes = copy, copy_bytes
        self.memory = _MEMORY * timing.memory_bytes()
        self.sizes = {name: _ring_bytes(run, name, batch, length) for name in run.mechanisms}
        bandwidth = run.bandwidth or _bandwidth(copy, copy_bytes)
        self.setups = setups(run, batch, length, bandwidth)
        fitting = {m: s for m, s in self.setups.items() if self.sizes[m] <= self.memory}
        self.programs = side_by_side.compiled(programs(run, fitting), run.load)
        self.mha: _Baseline | None = None
        self.copies: list[float] = []  # seconds

    def measure(self, on_row: OnRow) -> list[dict]:
        rows = []
        for mechanism in sorted(self.sizes, key=lambda name: (name != "mha", self.sizes[name])):
            fits = self._fits_beside_mha(mechanism)
            if not fits:
                self.mha = None  # frees its caches; later mechanisms are no smaller
            new = self._measure_mechanism(mechanism)
            rows += new if fits else [dict(no_speedup=NO_MHA) | r for r in new]
            for row in new:
                on_row(row)
            contenders.free()
        self.mha = None
        return add_public_speedup(sorted(rows, key=lambda r: _order(r, self.run)))

    def _fits_beside_mha(self, mechanism: str) -> bool:
        if mechanism == "mha" or "mha" not in self.sizes:
            return True
        return self.sizes["mha"] + self.sizes[mechanism] <= self.memory

    def _measure_mechanism(self, mechanism: str) -> list[dict]:
        free_bytes = self.memory - (self.sizes["mha"] if self.mha else 0)
        problem = _problem(self.setups[mechanism], self.sizes[mechanism], free_bytes)
        if isinstance(problem, str):
            return [self._names(mechanism, "") | dict(why=problem)]
        free_bytes -= self.sizes[mechanism]
        results = {  # samples, or reasons why there is none
            name: self._sample(name, mechanism, problem, free_bytes)
            for name in self.run.implementations
        }
        if mechanism == "mha":
            self.mha = _baseline(results)
        samples = {name: s for name, s in results.items() if not isinstance(s, str)}
        baseline = {_MHA: self.mha.sample} if self.mha and mechanism != "mha" else {}
        times = timing.interleaved({_COPY: self.copy} | baseline | samples, self.run.rounds)
        medians = {name: timing.spread(seconds).median for name, seconds in times.items()}
        self.copies.append(medians[_COPY])
        copied = self.copy_bytes / medians[_COPY]
        rows = []
        for name, sample in results.items():
            rows.append(self._names(mechanism, name))
            if name not in samples:
                rows[-1] |= dict(why=sample)
                continue
            rows[-1] |= row(problem, times[name], copied=copied, run=self.run)
            if self.mha and "seconds" in rows[-1]:
                mha = medians[_MHA if baseline else self.mha.implementation]
                rows[-1] |= _speedup(self.mha, mha, medians[name])
        return rows

    def _sample(
        self, name: str, mechanism: str, problem: contenders.Problem, free_bytes: float
    ) -> timing.Sample | str:
        shape = self.setups[mechanism].shape
        needed = self.sizes[mechanism] if contenders.copies_caches(name, shape) else 0
        if needed > free_bytes:
            return _too_large(needed, free_bytes, "its own layout's ")
        key = mechanism, name, self.batch, self.length
        return _sample(name, problem, self.programs[key], self.run)

    def _names(self, mechanism: str, implementation: str) -> dict:
        return _names(mechanism, implementation, self.batch, self.length)


def _baseline(results: Mapping[str, timing.Sample | str]) -> _Baseline | None:
    """Returns the first of our implementations that runs; None if none does."""
    reason = None
    for name in filter(IMPLEMENTATIONS.get, results):
        if not isinstance(results[name], str):
            return _Baseline(name, results[name], reason)
        reason = reason or f"{name}: {results[name]}"
    return None


def _speedup(baseline: _Baseline, mha: float, seconds: float) -> dict:
    """Returns `mha` / `seconds` as part of a row; empty if MHA's time is below the noise."""
    if mha <= 0:
        return {}
    reason = baseline.fallback_reason
    fallback = dict(mha_instead_of=reason) if reason else {}
    return dict(speedup=mha / seconds, mha_seconds=mha, mha_by=baseline.implementation) | fallback


def add_public_speedup(rows: list[dict]) -> list[dict]:
    """Adds the speedup over the fastest library's MHA to the rows of a batch and length."""
    public = {
        r["implementation"]: r["seconds"]["median"]
        for r in rows
        if r["mechanism"] == "mha" and r["implementation"] in LIBRARIES and "seconds" in r
    }
    if public:
        fastest = min(public, key=public.get)
        for r in rows:
            if "seconds" in r:
                r["public_speedup"] = public[fastest] / r["seconds"]["median"]
                r["public_by"] = fastest
    return rows


def row(problem: contenders.Problem, seconds: Sequence[float], *, copied: float, run: Run) -> dict:
    """Returns a contender's rates from its seconds per call; every logical byte counts once."""
    spread = timing.spread(seconds)
    if spread.median <= 0:
        return dict(why="its time is below the noise: raise --milliseconds")
    setup = problem.setup
    tokens = setup.batch * setup.length
    num_bytes = tokens * shapes.bytes_per_token(setup.shape, setup.dtype)
    rate = num_bytes / spread.median
    datasheet = datasheets.DEVICES.get(run.device)
    ring_bytes = len(problem.caches) * num_bytes
    return dict(
        cache_bytes=num_bytes,
        seconds=dataclasses.asdict(spread),
        gbps=rate / 1e9,
        of_datasheet=rate / datasheet.bandwidth if datasheet else None,
        of_copy=rate / copied,
        tflops=tokens * setup.shape.flops().per_key / spread.median / 1e12,
        caches=len(problem.caches),
        may_stay_on_chip=ring_bytes < timing.RING * run.on_chip_bytes,
        may_be_launches=jax.default_backend() == "gpu" and spread.median < timing.LAUNCHES,
    )


def _names(mechanism: str, implementation: str, batch: int, length: int) -> dict:
    return dict(mechanism=mechanism, implementation=implementation, batch=batch, length=length)


def _order(row: dict, run: Run) -> tuple:
    names = (*run.implementations, "")
    return run.mechanisms.index(row["mechanism"]), names.index(row["implementation"])


def _sample(
    name: str, problem: contenders.Problem, program: Callable, run: Run
) -> timing.Sample | str:
    """Returns a sample of the contender, or the reason why there is none."""
    return result_or_reason(lambda: contenders.sample(name, problem, program(), target=run.target))


class Refusal(str):
    """The reason why a contender is not installed or lacks support for a problem; no failure."""


def result_or_reason[T](make: Callable[[], T]) -> T | str:
    """Returns the result of `make`, or the error as text, so that the run goes on."""
    try:
        return make()
    except Exception as error:
        message = first_line(error)
        expected = isinstance(error, (NotImplementedError, ImportError))
        error.__traceback__ = None  # its frames hold arrays
        return Refusal(message) if expected else f"{type(error).__name__}: {message}"


def _ring_bytes(run: Run, mechanism: str, batch: int, length: int) -> int:
    """Returns the bytes of a mechanism's ring of caches."""
    shape = shapes.SHAPES[run.model][mechanism]
    num_bytes = batch * length * shapes.bytes_per_token(shape, run.dtype)
    return num_bytes * timing.ring(num_bytes, run.on_chip_bytes)


def _bandwidth(copy: timing.Sample, copy_bytes: int) -> float:
    """Returns a copy's approximate bytes/s, which sets the length of rounds."""
    return copy_bytes / max(timing.spread([copy() for _ in range(3)]).median, 1e-9)


def setups(run: Run, batch: int, length: int, bandwidth: float) -> dict[str, contenders.Setup]:
    """Returns each mechanism's setup; rounds are as long as `bandwidth` (bytes/s) says."""
    return {m: _setup(run, m, batch, length, bandwidth) for m in run.mechanisms}


def programs(
    run: Run, by_mechanism: Mapping[str, contenders.Setup]
) -> dict[tuple, Callable[[], side_by_side.Program]]:
    """Returns a function that makes each contender's program, by mechanism, name and point."""
    return {
        (mechanism, name, setup.batch, setup.length): functools.partial(
            contenders.program, name, setup
        )
        for mechanism, setup in by_mechanism.items()
        for name in run.implementations
    }


def _setup(run: Run, mechanism: str, batch: int, length: int, bandwidth: float) -> contenders.Setup:
    need = _ring_bytes(run, mechanism, batch, length)
    shape = shapes.SHAPES[run.model][mechanism]
    copies = need // (batch * length * shapes.bytes_per_token(shape, run.dtype))
    return contenders.Setup(
        shape=shape,
        batch=batch,
        length=length,
        dtype=run.dtype,
        copies=copies,
        passes=timing.passes(need, copies, bandwidth),
    )


def _problem(setup: contenders.Setup, needed: int, free_bytes: float) -> contenders.Problem | str:
    """Returns the mechanism's arrays on the device, or the reason why they do not fit."""
    if needed > free_bytes:
        return _too_large(needed, free_bytes)
    return result_or_reason(lambda: contenders.Problem(setup))


def _too_large(needed: float, free_bytes: float, owner: str = "") -> str:
    return f"{owner}{needed / 1e9:.1f} GB do not fit: {free_bytes / 1e9:.1f} GB are left"


def candidates(implementation: str, inputs, cache) -> list[dict[str, int]]:
    """Returns the tile sizes to try, defaults first; empty if the implementation has none.

    An implementation's module may define `candidates(inputs, cache)`, with the values of each
    parameter.
    """
    function = IMPLEMENTATIONS[implementation]
    module = importlib.import_module(function.__module__)
    if hasattr(module, "candidates"):
        grid = module.candidates(inputs, cache)
    elif "tile_kv" in inspect.signature(function).parameters:
        grid = dict(tile_kv=TILES)
    else:
        return []
    tried = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    return [{}, *tried]


def tune(run: Run, on_row: OnRow = lambda row: None) -> list[dict]:
    """Saves the fastest tile sizes of our implementations, for each shape; returns a row each."""
    rows = []
    kind = tuning.current_device_kind()
    ours = [name for name in run.implementations if name in IMPLEMENTATIONS]
    copy, copy_bytes = timing.copy(target=run.target)
    for batch, length in run.points:
        bandwidth, memory = _bandwidth(copy, copy_bytes), _MEMORY * timing.memory_bytes()
        by_mechanism = setups(run, batch, length, bandwidth)
        needs = {m: _ring_bytes(run, m, batch, length) for m in run.mechanisms}
        tried = {
            (m, name): candidates(name, *setup.abstract[:2])
            for m, setup in by_mechanism.items()
            if needs[m] <= memory
            for name in ours
        }
        programs = side_by_side.compiled(
            {
                (m, name, i): functools.partial(
                    contenders.program, name, by_mechanism[m], **parameters
                )
                for (m, name), grid in tried.items()
                for i, parameters in enumerate(grid)
            }
        )
        for mechanism, setup in by_mechanism.items():
            problem = _problem(setup, needs[mechanism], memory)
            if isinstance(problem, str):
                rows.append(_names(mechanism, "", batch, length) | dict(why=problem))
                on_row(rows[-1])
                continue
            for name in filter(lambda name: tried[mechanism, name], ours):
                names, grid = _names(mechanism, name, batch, length), tried[mechanism, name]
                compiled = [(p, programs[mechanism, name, i]) for i, p in enumerate(grid)]
                rows.append(names | _tuned(problem, name, compiled, run, kind))
                on_row(rows[-1])
            del problem  # frees its arrays before the next problem's are allocated
    return rows


def _tuned(
    problem: contenders.Problem,
    name: str,
    programs: Sequence[tuple[dict[str, int], Callable]],
    run: Run,
    kind: str,
) -> dict:
    samples, why = {}, []
    for parameters, program in programs:
        sample = _sample(name, problem, program, run)
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
    facts |= dict(all=[dict(parameters) | dict(seconds=s) for parameters, s in medians.items()])
    if not best:
        return dict(why=NOTHING_FASTER) | facts
    key = tuning.key(name, problem.inputs, problem.caches[0])
    saved = {fact: facts[fact] for fact in ("seconds", "by_default", "tried")}
    tuning.save(key, kind, dict(best), source="measured", **saved)
    return dict(key=key, parameters=dict(best)) | facts


def table(rows: Sequence[Mapping], title: str) -> Table:
    """Returns rows as a table, with reasons for missing times as notes."""
    header = ["mechanism", "by", "batch", "tokens", "us", "from", "to", "GB/s", "of datasheet"]
    header += ["of copy", "TFLOP/s", "MHA's time / its", "public MHA's / its"]
    notes = {}
    for r in rows:
        if r.get("may_stay_on_chip"):
            notes["\\*"] = "The caches may partly stay on the chip between calls."
        if r.get("may_be_launches"):
            us = f"{1e6 * timing.LAUNCHES:.0f} us"
            notes["†"] = f"Below {us} per call, kernel launches may dominate the time."
        if "mha_instead_of" in r:
            notes["‡"] = f"MHA by {r['mha_by']}, instead of {r['mha_instead_of']}."
        if "why" in r:
            names = f"{r['mechanism']} {r['implementation']}".rstrip()
            notes[f"{names}, {r['batch']} x {r['length']:,}:"] = r["why"]
    lines = [f"{sign} {note}" for sign, note in notes.items()]
    return Table(title, header, [_cells(r, len(header)) for r in rows], lines)


def _cells(r: Mapping, count: int) -> list[str]:
    cells = [r["mechanism"], r["implementation"], f"{r['batch']}", f"{r['length']:,}"]
    if "why" in r:  # shown as a note below the table
        return cells + ["-"] * (count - len(cells))
    of_datasheet = "" if r["of_datasheet"] is None else f"{r['of_datasheet']:.0%}"
    us = [f"{1e6 * s:,.1f}" for s in r["seconds"].values()]
    cells += [us[0] + ("†" if r["may_be_launches"] else ""), *us[1:]]
    cells += [f"{r['gbps']:,.1f}" + ("*" if r["may_stay_on_chip"] else "")]
    cells += [of_datasheet, f"{r['of_copy']:.0%}", f"{r['tflops']:.2f}"]
    sign = "‡" if "mha_instead_of" in r else ""
    cells += [f"{r['speedup']:.2f}{sign}" if "speedup" in r else r.get("no_speedup", "")]
    public = "public_speedup" in r
    return [*cells, f"{r['public_speedup']:.2f} ({r['public_by']})" if public else ""]
