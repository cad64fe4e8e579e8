"""Compiles a run for absent chips; prints its memory per chip and a lower bound of its time.

    python -m kvjax.aot --config=configs/lrkv_2p5b.py --topology=v5p:2x2x4
    python -m kvjax.aot --config=configs/lrkv_128m.py --topology=v5e:4x4 --sweep
    python -m kvjax.aot --config=configs/lrkv_2p5b.py --topology=h200:1 --step=decode --batch=16

Compiles the training step (or a decode step) for a topology: for TPUs with libtpu, for GPUs with
JAX's CUDA plugin. Prints memory per chip, FLOPs, collectives, and a lower bound of the step's time
(a roofline, see kvjax/aot/roofline.py), which gives an upper bound of MFU and a lower bound of
days. Override config keys by options such as --config.compute.remat=dots.
Exit status 0: fits into 90 % of the memory; 1: does not fit; 2: cannot be compiled.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import math
import pathlib
import sys

from kvjax import config as config_lib
from kvjax.aot import compilation, hlo, roofline, search, tables
from kvjax.cache import quantized
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, provenance, record_lines, runtime, target
from kvjax.foundation.configuration import at_least, one_of, to_text
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import topology

STEPS = ("train", "decode")
DECODE = {"batch": 1, "length": 8192, "chips": 1}  # options of a decode step
ASSUMPTIONS = (
    "compute, HBM and interconnect run at their datasheet's rates and overlap perfectly",
    "elementwise work, and reading activations inside a layer, cost nothing",
    "collectives use all links of a chip at once",
    "MFU counts attention over all T keys, even if the kernel skips masked ones",
)


def training(experiment: Experiment, name: str, step: compilation.Step) -> dict:
    """Returns the result for a compiled training step, JSON-able."""
    bound = compilation.bound(step, experiment)
    T = experiment.data.sequence_length
    causal_kernel = compilation.kernel_when_run(step.causal_kernel, step.device, experiment)
    flops = roofline.step_flops(experiment, causal_kernel=causal_kernel)
    train = experiment.train
    return _common_fields(step) | dict(
        config=experiment.name,
        step="train",
        topology=name,
        mesh=step.mesh,
        rows_per_pass=train.batch_size // train.grad_accumulation,
        tokens_per_step=experiment.tokens_per_step,
        remat=experiment.compute.remat,
        grad_accumulation=train.grad_accumulation,
        flops_per_token=formulas.training_flops_per_token(experiment.model, T),
        flops_per_step=dataclasses.asdict(flops),
        attention=_attention(causal_kernel, compiled_kernel=step.causal_kernel),
        collectives=hlo.summary(step.collectives),
        wire_bytes=step.wire_bytes,
        replicated=[dict(parameter=path, bytes=size) for path, size in step.replicated],
        bound=dict(
            seconds=bound.seconds,
            by=bound.binding,
            compute=bound.compute,
            hbm=bound.hbm,
            interconnect=bound.interconnect,
            mfu=bound.mfu,
            causal_mfu=bound.mfu * formulas.causal_share(experiment.model, T),
            tokens_per_second=bound.tokens_per_second,
            days=bound.days,
            exaflops=bound.exaflops,
            assumptions=list(ASSUMPTIONS),
        ),
    )


def _attention(causal_kernel: bool, *, compiled_kernel: bool) -> str:
    """Returns the name of the attention that the bound assumes; if another is compiled, of both."""
    names = {True: "causal kernel", False: "all T keys"}
    same = causal_kernel == compiled_kernel
    return names[causal_kernel] + ("" if same else f" (compiled: {names[compiled_kernel]})")


def decoding(
    experiment: Experiment, name: str, *, batch: int, length: int, chips: int, cache_dtype: str
) -> dict:
    """Compiles a decode step and returns its result, JSON-able; see `compilation.decode_step`."""
    shape = dict(batch=batch, length=length, cache_bits=quantized.bits_of(cache_dtype))
    step = compilation.decode_step(experiment, name, chips=chips, **shape)
    cost = formulas.decode_cost(experiment.model, dtype=compilation.BF16, **shape)
    per_chip = dataclasses.replace(  # weights are replicated, caches split
        cost,
        cache_bytes=cost.cache_bytes // chips,
        attention_flops_per_token=cost.attention_flops_per_token // chips,
    )
    seconds = per_chip.seconds(step.device)
    return _common_fields(step) | dict(
        config=experiment.name,
        step="decode",
        topology=name,
        batch=batch,
        length=length,
        cache_dtype=cache_dtype or "bfloat16",
        flops_per_token=cost.flops_per_token,
        read_bytes=per_chip.bytes,
        collectives=hlo.summary(step.collectives),
        wire_bytes=step.wire_bytes,
        bound=dict(seconds=seconds, tokens_per_second=batch / seconds),
    )


def sweep(experiment: Experiment, name: str, compiles: int, out: Output) -> dict:
    """Searches meshes; returns the result of the best candidate, its overrides and all candidates.

    Args:
      compiles: largest number of compilations.

    Raises:
      UserError: no candidate fits; the message has the sizes.
    """

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    tried = search.search(experiment, name, compiles=compiles, say=say)
    rows = [_candidate(c) for c in tried]
    tables.show_candidates(rows, out)
    best = search.best(tried)
    if best is None:
        raise UserError(
            f"{experiment.name} on {name}: none of {len(tried)} candidates fits. "
            + _why_none(tried, name)
        )
    out.say("\nBest: " + " ".join(best.overrides), wrap=False)
    report = training(best.experiment, name, best.step)
    return report | dict(candidates=rows, best_overrides=best.overrides)


def _why_none(tried: list[search.Candidate], name: str) -> str:
    if all(c.failure for c in tried):
        return f"None compiled: {tried[0].failure}"
    large = [c for c in tried if not c.failure]
    nearest = min(large, key=lambda c: c.needed or math.inf)  # 0: unknown
    return search.advice(nearest.experiment, name, nearest.needed)


def _candidate(c: search.Candidate) -> dict:
    e, p = c.experiment, c.predicted
    bound = compilation.bound(c.step, e) if c.step else p.bound
    return dict(
        mesh=dataclasses.asdict(e.mesh),
        grad_accumulation=e.train.grad_accumulation,
        remat=e.compute.remat,
        predicted_bytes=round(p.state + p.temporaries),
        needed_bytes=c.needed or None,
        failure=c.failure,
        fits=bool(c.step and c.step.fits),
        bound_seconds=bound.seconds,
        bound_by=bound.binding,
        seconds_in_sum=bound.compute + bound.hbm + bound.interconnect,
        mfu=bound.mfu,
        compiled=c.step is not None,
    )


def _common_fields(step: compilation.Step) -> dict:
    """Returns the fields that results of training and decode steps have in common."""
    memory = dataclasses.asdict(step.memory)
    return dict(
        device=step.device.name,
        chips=step.chips,
        memory=memory
        | dict(total=step.memory.total, hbm=step.device.hbm_bytes, part=step.memory_share),
        memory_is_upper_bound=step.upper_bound,
        fits=step.fits,
        xla=step.xla,
        seconds_to_lower=step.seconds_to_lower,
        seconds_to_compile=step.seconds_to_compile,
    )


def result_name(
    config: str, topology: str, step: str = "train", cache_dtype: str = "bfloat16"
) -> str:
    """Returns the name of a result's record in the file of --save."""
    suffix = "" if step == "train" else f"_{step}"
    suffix += "" if cache_dtype == "bfloat16" else f"_{cache_dtype}"
    return f"{config}_{topology.replace(':', '_')}{suffix}"


def _save(result: dict, output: str, save: str) -> None:
    packages = ("libtpu", "jax-cuda13-plugin")
    if output:
        file = target.check_file("--output", output)
        provenance.save(file, result, *packages, option="--output")
    elif save:
        keys = ("config", "topology", "step", "cache_dtype")
        name = result_name(**{key: result[key] for key in keys if key in result})
        provenance.save(pathlib.Path(save), result, *packages, name=name)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__, config=True)
    add = parser.add_argument
    add("--topology", required=True, help=f"kind and shape: {topology.examples()}")
    add("--step", default="train", help=f"one of {', '.join(STEPS)} (train)")
    add("--batch", type=int, help="for --step=decode: sequences decoded together (1)")
    add("--length", type=int, help="for --step=decode: tokens in each cache (8192)")
    add("--chips", type=int, help="for --step=decode: chips over which caches are split (1)")
    text = "for --step=decode: caches in int8 or int4 (bfloat16)"
    add("--cache_dtype", default="", help=text)
    text = "for --step=train: search mesh, gradient accumulation and remat policy"
    add("--sweep", action="store_true", help=text)
    add("--compiles", type=int, help="for --sweep: most compilations, minutes each (6)")
    text = "add the result to this file of JSON lines, or replace it there"
    add("--save", default="", metavar="FILE", help=text)
    add("--output", default="", metavar="FILE", help="write the JSON to this file")
    parser.add_output()
    options = parser.parse(arguments)
    one_of("--step", options.step, STEPS)
    if options.output:
        target.check_file("--output", options.output)
    elif options.save:
        options.save = str(target.check_file("--save", options.save))
        record_lines.check("--save", pathlib.Path(options.save))
    decode = options.step == "decode"
    if decode and options.sweep:
        raise UserError(
            "--sweep: only with --step=train; for a decode step use --batch and --chips"
        )
    if options.cache_dtype and not decode:
        raise UserError(
            f"--cache_dtype = {options.cache_dtype!r}: only with --step=decode; leave it out, or "
            "add --step=decode"
        )
    with command_line.naming_options(options):
        quantized.bits_of(options.cache_dtype)
    for key, default in DECODE.items():
        _set_default(options, key, default, decode, needs="--step=decode")
    _set_default(options, "compiles", 6, options.sweep, needs="--sweep")
    return options


def _set_default(options, key: str, default: int, used: bool, *, needs: str) -> None:
    """Sets an option's default; raises a UserError if the option is given but would have no effect.

    Args:
      used: True if the option has an effect.
      needs: the option without which it has none, for the message.
    """
    value = getattr(options, key)
    if value is not None and not used:
        raise UserError(f"--{key} = {value}: only with {needs}; leave it out, or add {needs}")
    setattr(options, key, default if value is None else value)
    at_least(f"--{key}", getattr(options, key), 1)


def _run(options: argparse.Namespace, out: Output) -> tuple[dict, str]:
    """Compiles as the options say; returns the result, and advice if the step does not fit."""
    name, overrides = options.topology, options.overrides
    config = command_line.load_config(options.config, overrides)
    experiment = config_lib.resolve(config)
    settings = dict(overrides=overrides, resolved=to_text(config).splitlines())
    if options.step == "decode":
        shape = {key: getattr(options, key) for key in (*DECODE, "cache_dtype")}
        advise = functools.partial(search.decode_advice, experiment, name, **shape)
        waiting = progress.waiting(f"compiling the decode step for {name}")
        with _explain_errors(experiment, name, advise), waiting:
            result = decoding(experiment, name, **shape)
        return result | settings, "" if result["fits"] else advise(result["memory"]["total"])
    if options.sweep:
        return sweep(experiment, name, options.compiles, out) | settings, ""
    advise = functools.partial(search.advice, experiment, name)
    waiting = progress.waiting(f"compiling the training step for {name}")
    with _explain_errors(experiment, name, advise), waiting:
        step = compilation.training_step(experiment, name)
    advice = "" if step.fits else advise(step.memory.total)
    return training(experiment, name, step) | settings, advice


@contextlib.contextmanager
def _explain_errors(
    experiment: Experiment, name: str, advise: Callable[[int], str]
) -> Iterator[None]:
    """Turns compilation errors into UserErrors that name config and topology.

    Args:
      advise: returns advice for a step that needs this many bytes.
    """
    try:
        yield
    except compilation.TooLarge as error:
        message = f"{error}. {advise(error.needed)}"
        raise UserError(f"{experiment.name} does not fit {name}: {message}") from error
    except compilation.DoesNotCompile as error:
        raise UserError(f"{experiment.name} does not compile for {name}: {error}") from error


def main(arguments: list[str]) -> int:
    """Compiles and prints; returns the exit status. See the module's docstring."""
    options = _options(arguments)
    if options.save:
        provenance.check_commit("--save", pathlib.Path(options.save))
    out = Output(options)
    runtime.start(compilation_cache=False)  # programs for absent devices cannot be read back
    with command_line.naming_options(options):
        result, advice = _run(options, out)
    try:
        _save(result, options.output, options.save)
    finally:  # also if writing fails
        tables.show(result, out, limit=compilation.LIMIT)
    if advice:
        command_line.say(advice)
    out.result(result)
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    command_line.run(main)
