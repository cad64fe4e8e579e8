"""Decode attention timed on the device that is present: rows of a table, and block sizes."""

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

TILES = (256, 512, 1024, 2048, 4096)  # where an implementation's module has no CANDIDATES
NOTHING_FASTER = "nothing is faster than its own block sizes"
NO_MHA = "MHA does not fit beside it"
_MEMORY = 0.85  # of the device's, for caches
_COPY, _MHA = " copy", " mha"  # beside implementations' names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What to measure, and how."""

    model: str
    mechanisms: Sequence[str]
    points: Sequence[tuple[int, int]]  # (batch, length)
    implementations: Sequence[str]
    rounds: int
    target: float  # seconds by which the longer chain of calls is longer
    device: str | None  # a name of datasheets.DEVICES, or "cpu"; None: no datasheet of it

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)

    @property
    def on_chip_bytes(self) -> float:
        return timing.ON_CHIP_BYTES.get(self.device, max(timing.ON_CHIP_BYTES.values()))


Found = Callable[[Mapping], None]  # is given every row once it is measured


def measure(run: Run, found: Found = lambda row: None) -> tuple[list[dict], float]:
    """Rows, a mechanism and implementation each, by batch and length; and the copy's bytes/s."""
    copy, copy_bytes = timing.copy(target=run.target)
    rows, copies = [], []
    for batch, length in run.points:
        point = _Point(run, batch, length, copy, copy_bytes)
        rows += point.measure(found)
        copies += point.copies
    return rows, copy_bytes / timing.spread(copies or [copy()]).median


@dataclasses.dataclass(frozen=True)
class _Baseline:
    """Our MHA, its caches on the device; `instead`: why it is not our first implementation's."""

    implementation: str
    sample: timing.Sample
    instead: str | None


class _Point:
    """Measures one batch and length.

    A mechanism's contenders are measured in turns with a copy and our MHA, and freed before the
    next: what must be held together is a mechanism and MHA, or the mechanism where that is too
    much. Libraries' MHA is timed once, in MHA's turns.
    """

    def __init__(self, run: Run, batch: int, length: int, copy: timing.Sample, copy_bytes: int):
        self.run, self.batch, self.length = run, batch, length
        self.copy, self.copy_bytes = copy, copy_bytes
        self.memory = _MEMORY * timing.memory_bytes()
        self.sizes = {name: _ring_bytes(run, name, batch, length) for name in run.mechanisms}
        bandwidth = _bandwidth(copy, copy_bytes)
        self.setups = {name: _setup(run, name, batch, length, bandwidth) for name in run.mechanisms}
        self.programs = side_by_side.compiled(
            {
                (mechanism, name): functools.partial(contenders.lower, name, setup)
                for mechanism, setup in self.setups.items()
                for name in run.implementations
                if self.sizes[mechanism] <= self.memory
            }
        )
        self.mha: _Baseline | None = None
        self.copies: list[float] = []  # seconds

    def measure(self, found: Found) -> list[dict]:
        rows = []
        for mechanism in sorted(self.sizes, key=lambda name: (name != "mha", self.sizes[name])):
            beside = self._fits_beside_mha(mechanism)
            if not beside:
                self.mha = None  # frees its caches; what follows is no smaller
            new = self._in_turns(mechanism)
            rows += new if beside else [dict(no_speedup=NO_MHA) | r for r in new]
            for row in new:
                found(row)
            contenders.free()
        self.mha = None
        return _beside_public(sorted(rows, key=lambda r: _order(r, self.run)))

    def _fits_beside_mha(self, mechanism: str) -> bool:
        if mechanism == "mha" or "mha" not in self.sizes:
            return True
        return self.sizes["mha"] + self.sizes[mechanism] <= self.memory

    def _in_turns(self, mechanism: str) -> list[dict]:
        left = self.memory - (self.sizes["mha"] if self.mha else 0)
        problem = _problem(self.setups[mechanism], self.sizes[mechanism], left)
        if isinstance(problem, str):
            return [self._names(mechanism, "") | dict(why=problem)]
        left -= self.sizes[mechanism]
        sample = lambda name: self._sample(name, mechanism, problem, left)
        found = {name: sample(name) for name in self.run.implementations}
        if mechanism == "mha":
            self.mha = _baseline(found)
        samples = {name: s for name, s in found.items() if not isinstance(s, str)}
        beside = {_MHA: self.mha.sample} if self.mha and mechanism != "mha" else {}
        taken = timing.interleaved({_COPY: self.copy} | beside | samples, self.run.rounds)
        medians = {name: timing.spread(seconds).median for name, seconds in taken.items()}
        self.copies.append(medians[_COPY])
        copied = self.copy_bytes / medians[_COPY]
        for name, sample in found.items():
            if name not in samples:
                found[name] = dict(why=sample)
                continue
            found[name] = row(problem, taken[name], copied=copied, run=self.run)
            if self.mha and "seconds" in found[name]:
                mha = medians[_MHA if beside else self.mha.implementation]
                found[name] |= _speedup(self.mha, mha, medians[name])
        return [self._names(mechanism, name) | said for name, said in found.items()]

    def _sample(
        self, name: str, mechanism: str, problem: contenders.Problem, left: float
    ) -> timing.Sample | str:
        shape = self.setups[mechanism].shape
        need = self.sizes[mechanism] if contenders.copies_caches(name, shape) else 0
        if need > left:
            return _too_large(need, left, "its own layout's ")
        return _sample(name, problem, self.programs[mechanism, name], self.run)

    def _names(self, mechanism: str, implementation: str) -> dict:
        return _names(mechanism, implementation, self.batch, self.length)


def _baseline(found: Mapping[str, timing.Sample | str]) -> _Baseline | None:
    """The first of our implementations that runs; None where none does."""
    instead = None
    for name in filter(IMPLEMENTATIONS.get, found):
        if not isinstance(found[name], str):
            return _Baseline(name, found[name], instead)
        instead = instead or f"{name}: {found[name]}"
    return None


def _speedup(baseline: _Baseline, mha: float, seconds: float) -> dict:
    """MHA's time over these seconds, and whose MHA; nothing where MHA's drowns in the noise."""
    if mha <= 0:
        return {}
    instead = dict(mha_instead_of=baseline.instead) if baseline.instead else {}
    return dict(speedup=mha / seconds, mha_seconds=mha, mha_by=baseline.implementation) | instead


def _beside_public(rows: list[dict]) -> list[dict]:
    """The rows of a batch and length, those with a time beside the fastest library's MHA."""
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
    """Rates of one contender from its seconds per call; logical bytes, each read once."""
    taken = timing.spread(seconds)
    if taken.median <= 0:
        return dict(why="its time drowns in the noise: take more --milliseconds")
    setup = problem.setup
    tokens = setup.batch * setup.length
    num_bytes = tokens * shapes.bytes_per_token(setup.shape, setup.dtype)
    rate = num_bytes / taken.median
    datasheet = datasheets.DEVICES.get(run.device)
    around = len(problem.caches) * num_bytes
    return dict(
        cache_bytes=num_bytes,
        seconds=dataclasses.asdict(taken),
        gbps=rate / 1e9,
        of_datasheet=rate / datasheet.bandwidth if datasheet else None,
        of_copy=rate / copied,
        tflops=tokens * setup.shape.flops().per_key / taken.median / 1e12,
        caches=len(problem.caches),
        may_stay_on_chip=around < timing.RING * run.on_chip_bytes,
        may_be_launches=jax.default_backend() == "gpu" and taken.median < timing.LAUNCHES,
    )


def _names(mechanism: str, implementation: str, batch: int, length: int) -> dict:
    return dict(mechanism=mechanism, implementation=implementation, batch=batch, length=length)


def _order(row: dict, run: Run) -> tuple:
    names = (*run.implementations, "")
    return run.mechanisms.index(row["mechanism"]), names.index(row["implementation"])


def _sample(
    name: str, problem: contenders.Problem, program: Callable, run: Run
) -> timing.Sample | str:
    """The contender's measurement, or why there is none."""
    return or_why(lambda: contenders.sample(name, problem, program(), target=run.target))


class Refusal(str):
    """Why a contender does not take a problem, or is not here: nothing failed."""


def or_why[T](make: Callable[[], T]) -> T | str:
    """What is made, or why it is not: one that fails does not end the run."""
    try:
        return make()
    except Exception as error:
        said = first_line(error)
        expected = isinstance(error, (NotImplementedError, ImportError))
        error.__traceback__ = None  # whoever keeps the error would keep arrays of these frames
        return Refusal(said) if expected else f"{type(error).__name__}: {said}"


def _ring_bytes(run: Run, mechanism: str, batch: int, length: int) -> int:
    """Bytes of the ring of caches that a mechanism's calls go round."""
    shape = shapes.SHAPES[run.model][mechanism]
    num_bytes = batch * length * shapes.bytes_per_token(shape, run.dtype)
    return num_bytes * timing.ring(num_bytes, run.on_chip_bytes)


def _bandwidth(copy: timing.Sample, copy_bytes: int) -> float:
    """Bytes/s of a copy, about; by which rounds are made long enough."""
    return copy_bytes / max(timing.spread([copy() for _ in range(3)]).median, 1e-9)


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


def _problem(setup: contenders.Setup, need: int, left: float) -> contenders.Problem | str:
    """The mechanism on the device, where it fits the bytes that are left; or why it is not."""
    return _too_large(need, left) if need > left else or_why(lambda: contenders.Problem(setup))


def _too_large(need: float, left: float, what: str = "") -> str:
    return f"{what}{need / 1e9:.1f} GB do not fit: {left / 1e9:.1f} GB are left"


def candidates(implementation: str) -> list[dict[str, int]]:
    """Returns the tile sizes to try, the implementation's defaults first; empty if it takes none.

    An implementation's module may say CANDIDATES: dict(tile_kv=(256, 512), ...).
    """
    function = IMPLEMENTATIONS[implementation]
    module = importlib.import_module(function.__module__)
    own = getattr(module, "decode_attention", function)
    takes = inspect.signature(getattr(module, "attend_with_lse", own)).parameters
    grid = getattr(module, "CANDIDATES", dict(tile_kv=TILES))
    grid = {name: values for name, values in grid.items() if name in takes}
    if not grid:
        return []
    tried = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    return [{}, *tried]


def tune(run: Run, found: Found = lambda row: None) -> list[dict]:
    """The fastest block sizes of our implementations, each shape by itself; saved."""
    rows = []
    kind = tuning.current_device_kind()
    ours = [name for name in run.implementations if name in IMPLEMENTATIONS and candidates(name)]
    copy, copy_bytes = timing.copy(target=run.target)
    for batch, length in run.points:
        bandwidth, memory = _bandwidth(copy, copy_bytes), _MEMORY * timing.memory_bytes()
        setups = {m: _setup(run, m, batch, length, bandwidth) for m in run.mechanisms}
        needs = {m: _ring_bytes(run, m, batch, length) for m in run.mechanisms}
        programs = side_by_side.compiled(
            {
                (m, name, i): functools.partial(contenders.lower, name, setup, **parameters)
                for m, setup in setups.items()
                if needs[m] <= memory
                for name in ours
                for i, parameters in enumerate(candidates(name))
            }
        )
        for mechanism, setup in setups.items():
            problem = _problem(setup, needs[mechanism], memory)
            if isinstance(problem, str):
                rows.append(_names(mechanism, "", batch, length) | dict(why=problem))
                found(rows[-1])
                continue
            for name in ours:
                names = _names(mechanism, name, batch, length)
                of = [(p, programs[mechanism, name, i]) for i, p in enumerate(candidates(name))]
                rows.append(names | _tuned(problem, name, of, run, kind))
                found(rows[-1])
            del problem  # freed before the next is built
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
    said = {fact: facts[fact] for fact in ("seconds", "by_default", "tried")}
    tuning.save(key, kind, dict(best), source="measured", **said)
    return dict(key=key, parameters=dict(best)) | facts


def table(rows: Sequence[Mapping], title: str) -> Table:
    """Rows as a table; one without a time says why."""
    header = ["mechanism", "by", "batch", "tokens", "us", "from", "to", "GB/s", "of datasheet"]
    header += ["of copy", "TFLOP/s", "MHA's time / its", "public MHA's / its"]
    notes = {}
    for r in rows:
        if r.get("may_stay_on_chip"):
            notes["\\*"] = "The caches may stay on the chip between calls, in part."
        if r.get("may_be_launches"):
            us = f"{1e6 * timing.LAUNCHES:.0f} us"
            notes["†"] = f"Below {us} a call, launching its kernels may be what is measured."
        if "mha_instead_of" in r:
            notes["‡"] = f"MHA by {r['mha_by']}, for want of {r['mha_instead_of']}."
        if "why" in r:
            names = f"{r['mechanism']} {r['implementation']}".rstrip()
            notes[f"{names}, {r['batch']} x {r['length']:,}:"] = r["why"]
    said = [f"{sign} {note}" for sign, note in notes.items()]
    return Table(title, header, [_cells(r, len(header)) for r in rows], said)


def _cells(r: Mapping, count: int) -> list[str]:
    cells = [r["mechanism"], r["implementation"], f"{r['batch']}", f"{r['length']:,}"]
    if "why" in r:  # which is a note below the table
        return cells + ["-"] * (count - len(cells))
    part = lambda x: "" if x is None else f"{x:.0%}"
    us = [f"{1e6 * s:,.1f}" for s in r["seconds"].values()]
    cells += [us[0] + ("†" if r["may_be_launches"] else ""), *us[1:]]
    cells += [f"{r['gbps']:,.1f}" + ("*" if r["may_stay_on_chip"] else "")]
    cells += [part(r["of_datasheet"]), part(r["of_copy"]), f"{r['tflops']:.2f}"]
    sign = "‡" if "mha_instead_of" in r else ""
    cells += [f"{r['speedup']:.2f}{sign}" if "speedup" in r else r.get("no_speedup", "")]
    public = "public_speedup" in r
    return [*cells, f"{r['public_speedup']:.2f} ({r['public_by']})" if public else ""]
