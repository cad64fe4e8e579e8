"""What a run needs of chips that are not there, from the compiler itself.

    python -m kvjax.aot --config=configs/lrkv_2p5b.py --topology=v5p:2x2x4
    python -m kvjax.aot --config=configs/lrkv_128m.py --topology=v5e:4x4 --sweep
    python -m kvjax.aot --config=configs/lrkv_2p5b.py --topology=h200:1 --step=decode --batch=16

Compiles the whole training step (or a decode step) for a topology: TPUs by libtpu,
GPUs by JAX's CUDA plugin. Prints memory per chip, FLOPs, collectives, and the least time the step
can take (a roofline: see kvjax/roofline.py for what it counts), hence at most what MFU and at least
how many days. Config keys are overridden as --config.compute.remat=dots. The last line is JSON.
Status 0: it fits, with a tenth of memory to spare; 1: it does not; 2: it cannot be compiled.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from kvjax import ahead
from kvjax import aot_tables as tables
from kvjax import command_line
from kvjax import compiled
from kvjax import costs
from kvjax import experiment as experiment_lib
from kvjax import fitting
from kvjax import roofline
from kvjax import runtime
from kvjax import topology
from kvjax.configuration import at_least
from kvjax.configuration import one_of
from kvjax.configuration import to_text
from kvjax.errors import UserError
from kvjax.experiment import Experiment
from kvjax.provenance import provenance

RESULTS = pathlib.Path(__file__).parents[1] / "experiments" / "results" / "aot"
STEPS = ("train", "decode")
ASSUMPTIONS = (
    "every resource at its datasheet's rate all the time, the three overlapping perfectly",
    "elementwise work and what products read inside a layer cost nothing",
    "collectives use all links of a chip at once",
    "MFU counts attention over all T keys, computed or not",
)


def training(experiment: Experiment, name: str, step: ahead.Step) -> dict:
    """Everything the command says of a compiled training step, JSON-able."""
    bound = ahead.bound(step, experiment)
    T = experiment.data.sequence_length
    flops = roofline.step_flops(experiment, causal_kernel=step.causal_kernel)
    train = experiment.train
    return _shared(step) | dict(
        config=experiment.name,
        step="train",
        topology=name,
        mesh=step.mesh,
        rows_per_pass=train.batch_size // train.grad_accumulation,
        tokens_per_step=experiment.tokens_per_step,
        remat=experiment.compute.remat,
        grad_accumulation=train.grad_accumulation,
        flops_per_token=costs.training_flops_per_token(experiment.model, T),
        flops_per_step=dataclasses.asdict(flops),
        attention="causal kernel" if step.causal_kernel else "all T keys",
        collectives=compiled.summary(step.collectives),
        wire_bytes=step.wire_bytes,
        replicated=[dict(parameter=path, bytes=size) for path, size in step.whole],
        bound=dict(
            seconds=bound.seconds,
            by=bound.binding,
            compute=bound.compute,
            hbm=bound.hbm,
            interconnect=bound.interconnect,
            mfu=bound.mfu,
            tokens_per_second=bound.tokens_per_second,
            days=bound.days,
            exaflops=bound.exaflops,
            assumptions=list(ASSUMPTIONS),
        ),
    )


def decoding(experiment: Experiment, name: str, *, batch: int, length: int, chips: int) -> dict:
    """Everything the command says of a decode step, JSON-able; raises as `ahead`."""
    step = ahead.decode_step(experiment, name, batch=batch, length=length, chips=chips)
    whole = costs.decode_cost(experiment.model, length=length, batch=batch, dtype=ahead.BF16)
    per_chip = dataclasses.replace(  # weights are on every chip, caches split
        whole,
        cache_bytes=whole.cache_bytes // chips,
        attention_flops_per_token=whole.attention_flops_per_token // chips,
    )
    seconds = per_chip.seconds(step.device)
    return _shared(step) | dict(
        config=experiment.name,
        step="decode",
        topology=name,
        batch=batch,
        length=length,
        flops_per_token=whole.flops_per_token,
        read_bytes=per_chip.bytes,
        collectives=compiled.summary(step.collectives),
        wire_bytes=step.wire_bytes,
        bound=dict(seconds=seconds, tokens_per_second=batch / seconds),
    )


def sweep(experiment: Experiment, name: str, compiles: int) -> dict:
    """The report of the best candidate, with the overrides that make it and all that was tried.

    Raises:
      UserError: nothing that was compiled fits; the message says by how much.
    """
    say = lambda line: print(line, file=sys.stderr, flush=True)
    tried = fitting.search(experiment, name, compiles=compiles, say=say)
    rows = [_candidate(c) for c in tried]
    tables.show_candidates(rows)
    best = fitting.best(tried)
    if best is None:
        nearest = min(tried, key=lambda c: _needed(c))
        raise UserError(
            f"{experiment.name} on {name}: none of {len(tried)} candidates fits. "
            + fitting.advice(nearest.experiment, name, _needed(nearest))
        )
    print("\nBest: " + " ".join(best.overrides))
    report = training(best.experiment, name, best.step)
    return report | dict(candidates=rows, best_overrides=best.overrides)


def _needed(c: fitting.Candidate) -> int:
    return c.step.memory.total if c.step else c.too_large.needed


def _candidate(c: fitting.Candidate) -> dict:
    e, p = c.experiment, c.predicted
    bound = ahead.bound(c.step, e) if c.step else p.bound
    return dict(
        mesh=dataclasses.asdict(e.mesh),
        grad_accumulation=e.train.grad_accumulation,
        remat=e.compute.remat,
        predicted_bytes=round(p.state + p.temporaries),
        needed_bytes=_needed(c),
        fits=bool(c.step and c.step.fits),
        bound_seconds=bound.seconds,
        bound_by=bound.binding,
        seconds_in_sum=bound.compute + bound.hbm + bound.interconnect,
        mfu=bound.mfu,
        compiled=c.step is not None,
    )


def _shared(step: ahead.Step) -> dict:
    memory = dataclasses.asdict(step.memory)
    return dict(
        device=step.device.name,
        chips=step.chips,
        memory=memory | dict(total=step.memory.total, hbm=step.device.hbm_bytes, part=step.part),
        memory_is_upper_bound=step.upper_bound,
        fits=step.fits,
        xla=step.xla,
        seconds_to_lower=step.seconds_to_lower,
        seconds_to_compile=step.seconds_to_compile,
    )


def _save(result: dict, output: str, save: bool) -> None:
    if not output and not save:
        return
    stem = f"{result['config']}_{result['topology'].replace(':', '_')}"
    step = "" if result["step"] == "train" else f"_{result['step']}"
    file = pathlib.Path(output) if output else RESULTS / f"{stem}{step}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    made_by = provenance("libtpu", "jax-cuda13-plugin")
    file.write_text(json.dumps(result | {"made_by": made_by}, indent=1) + "\n")
    print(f"written: {file}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(
        description=__doc__.rstrip(),
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, help="a file; override keys: --config.x.y=...")
    add("--topology", required=True, help=f"kind and shape: {topology.examples()}")
    add("--step", default="train", help=f"of {', '.join(STEPS)}")
    add("--batch", type=int, default=1, help="of --step=decode: sequences decoded together")
    add("--length", type=int, default=8192, help="of --step=decode: tokens in each cache")
    add("--chips", type=int, default=1, help="of --step=decode: chips that caches are split over")
    add("--sweep", action="store_true", help="tries accumulation, remat policies and meshes")
    add("--compiles", type=int, default=6, help="of --sweep: at most so many, minutes each")
    add("--save", action="store_true", help="write experiments/results/aot/CONFIG_TOPOLOGY.json")
    add("--output", default="", help="write the JSON to this file")
    options, overrides = parser.parse_known_args(arguments)
    one_of("--step", options.step, STEPS)
    at_least("--batch", options.batch, 1)
    at_least("--length", options.length, 1)
    at_least("--compiles", options.compiles, 1)
    return options, overrides


def _run(options: argparse.Namespace, overrides: list[str]) -> tuple[dict, str]:
    """The result, and what to say to someone whose config does not fit."""
    name = options.topology
    config = command_line.load_config(pathlib.Path(options.config), overrides)
    experiment = experiment_lib.resolve(config)
    asked = dict(overrides=overrides, resolved=to_text(config).splitlines())
    if options.step == "decode":
        shape = dict(batch=options.batch, length=options.length, chips=options.chips)
        return decoding(experiment, name, **shape) | asked, ""
    if options.sweep:
        return sweep(experiment, name, options.compiles) | asked, ""
    try:
        step = ahead.training_step(experiment, name)
    except ahead.TooLarge as error:
        advice = fitting.advice(experiment, name, error.needed)
        raise UserError(f"{experiment.name} does not fit {name}: {error}. {advice}") from error
    advice = "" if step.fits else fitting.advice(experiment, name, step.memory.total)
    return training(experiment, name, step) | asked, advice


def main(argv: list[str]) -> int:
    """The exit status, see the module's docstring."""
    try:
        options, overrides = _options(argv[1:])
        runtime.start(compilation_cache=False)  # what is compiled here cannot be read back here
        result, advice = _run(options, overrides)
        tables.show(result, limit=ahead.LIMIT)
        _save(result, options.output, options.save)
    except (UserError, OSError) as error:
        print(f"kvjax: {error}", file=sys.stderr)
        return 2
    if advice:
        print(advice, file=sys.stderr)
    print(json.dumps(result))
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
