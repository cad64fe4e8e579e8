"""A published model in, a workdir out; its KV cache made smaller on the way, if asked.

    python -m kvjax.convert --source=~/models/SmolLM2-135M --out=runs/smollm2
    python -m kvjax.convert --source=runs/smollm2 --out=runs/thin --method=thin_keys --rank=32
    python -m kvjax.convert --source=runs/smollm2 --out=runs/lrkv --method=lrkv --rank=16

A source is a folder of Hugging Face's (config.json, safetensors, tokenizer.json), a GGUF file, or a
workdir. Then `python -m kvjax.generate --workdir=OUT` generates, from the smaller cache, and
`python -m kvjax.main --config=OUT/recover.py` tunes what the conversion made.
"""

import argparse
from collections.abc import Iterator
import contextlib
import dataclasses
import tempfile

from etils import epath
import jax.numpy as jnp
import numpy as np

from kvjax.convert import budget
from kvjax.convert import calibration
from kvjax.convert import into_workdir
from kvjax.convert import model as model_lib
from kvjax.convert import perplexity
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import LowRankKV
from kvjax.convert.methods import Method
from kvjax.convert.methods import ThinKeys
from kvjax.convert.model import Model
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.foundation import command_line
from kvjax.foundation import provenance
from kvjax.foundation import runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.configuration import between
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.foundation.output import Table
from kvjax.model.transformer import Compute

METHODS = ("none", "thin_keys", "lrkv")
# Options by the methods that have them.
_OPTIONS = dict(
    **dict.fromkeys(("rank", "energy", "cache", "multiple", "objective"), METHODS[1:]),
    **dict.fromkeys(("calibrate", "calibrate_tokens"), METHODS[1:]),
    **dict.fromkeys(("mode", "part", "value_rank"), ("thin_keys",)),
    **dict.fromkeys(("bases", "align"), ("lrkv",)),
)
_RANKS = ("rank", "energy", "cache")
_DTYPE = jnp.dtype(jnp.bfloat16)  # of the cache, for figures


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--source", default="", help="a folder, a .gguf file, or a workdir")
    add("--out", default="", help="the workdir to write; nothing may be there")
    add("--method", default="none", help=f"{', '.join(METHODS)} (none: as it is)")
    group = parser.add_argument_group("thin_keys and lrkv")
    add = group.add_argument
    add("--rank", type=int, help="channels of a latent, or of a head's residual")
    text = "what counts: errors of the weights, of keys and values (inputs), of logits and outputs"
    add("--energy", type=float, help="instead: the share that every layer keeps, of its own rank")
    add("--cache", type=float, help="instead: the share of the cache, its ranks by energy")
    add("--multiple", type=int, default=8, help="of which ranks by energy are (8)")
    add("--objective", default="outputs", help=f"{text} (outputs)")
    add("--mode", default="per_head", help="thin_keys: a latent per_head, or one joint (per_head)")
    text = "thin_keys: key, or key_value; query, both (it and the key), value as controls (key)"
    add("--part", default="key", help=text)
    add("--value_rank", type=int, help="thin_keys: of values, with --part=key_value (as keys)")
    add("--bases", type=int, default=1, help="lrkv: bases that KV heads share (1)")
    text = "lrkv: turn heads towards each other first (yes)"
    add("--align", action=argparse.BooleanOptionalAction, default=True, help=text)
    group = parser.add_argument_group("text")
    add = group.add_argument
    add("--calibrate", default="embedded", help="text to calibrate on, as config.data.source")
    add("--calibrate_tokens", type=int, default=32_768, help="of it (32768)")
    add("--evaluate", default="embedded", help="text whose held-out part perplexity is taken on")
    text = "of it; 0: no perplexity (16384 with a method, else 0)"
    add("--evaluate_tokens", type=int, help=text)
    add("--row_length", type=int, default=512, help="tokens of a row of either (512)")
    return parser


def main(arguments: list[str]) -> None:
    """Converts; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    for name, meant in (("source", "a folder, a .gguf file or a workdir"), ("out", "a new folder")):
        if not getattr(options, name):
            raise UserError(f"--{name} is missing: give {meant}")
    method = _method(options)
    if options.evaluate_tokens is None:
        asked = method or options.evaluate != _parser().get_default("evaluate")
        options.evaluate_tokens = 16_384 if asked else 0
    target = into_workdir.check(options.out)
    runtime.start()
    source = model = _opened(options.source)
    by_layer = [method] * source.transformer.block.num_layers
    if method is not None:
        ConvertedModel(source, by_layer, None)  # raises what is wrong before text is read
    calibrating_BT = evaluated_BT = moments = None
    if method is not None and method.objective != "weights":
        calibrating_BT = _rows(options, source, key="calibrate", split="train")
    if options.evaluate_tokens:
        evaluated_BT = _rows(options, source, key="evaluate", split="validation")
    if calibrating_BT is not None:
        moments = calibration.moments(source, calibrating_BT[:, :-1])
    if method is not None:
        if options.rank is None:
            by_layer = _by_layer(options, method, source, moments)
        model = ConvertedModel(source, by_layer, moments)
    record = _record(options, method, source, model)
    into_workdir.write(model, target, record)
    result = dict(record)
    if evaluated_BT is not None:
        result["perplexity"] = _perplexities(options, source, evaluated_BT)
    _report(out, options, source, result)


def _opened(source: str) -> Model:
    """The model of the option; what is wrong with it names the option."""
    try:
        return model_lib.open(source)
    except UserError as error:
        told = str(error) if "--source" in str(error) else f"--source={source}: {error}"
        raise UserError(told) from error


def _method(options: argparse.Namespace) -> Method | None:
    """The method asked for; a UserError for options that it does not have."""
    one_of("method", options.method, METHODS)
    for name in ("calibrate_tokens", "row_length"):
        at_least(name, getattr(options, name), 1)
    if options.evaluate_tokens is not None:
        at_least("evaluate_tokens", options.evaluate_tokens, 0)
    for name, of in _OPTIONS.items():
        given = getattr(options, name)
        if options.method not in of and given != _parser().get_default(name):
            raise UserError(f"--{name}={given}: is of --method={' and '.join(of)} alone")
    if options.method == "none":
        return None
    given = [name for name in _RANKS if getattr(options, name) is not None]
    if not given:
        needs = f"--method={options.method} needs one, as --rank=32"
        raise UserError(f"--rank is missing: {needs}, or --energy=0.95, or --cache=0.5")
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]}: give one of them")
    for name in ("energy", "cache"):
        if getattr(options, name) is not None:
            between(name, getattr(options, name), 0.0, 1.0)
    at_least("multiple", options.multiple, 1)
    rank = 1 if options.rank is None else options.rank
    shared = dict(rank=rank, objective=options.objective)
    if options.method == "lrkv":
        return LowRankKV(**shared, bases=options.bases, align=options.align)
    if options.value_rank is not None:
        if options.part != "key_value":
            raise UserError(f"--value_rank={options.value_rank}: is of --part=key_value alone")
        if options.rank is None:
            raise UserError(
                f"--value_rank={options.value_rank}: is of --rank alone, not of --{given[0]}"
            )
        at_least("value_rank", options.value_rank, 1)
        shared["value_rank"] = options.value_rank
    absorb = options.rank is not None
    return ThinKeys(**shared, mode=options.mode, part=options.part, absorb=absorb)


def _by_layer(
    options: argparse.Namespace, method: Method, source: Model, moments: list | None
) -> list[Method]:
    """The method with each layer's own rank."""
    shares = budget.spectra(source, method, moments)
    at = lambda rank: dataclasses.replace(method, rank=rank)
    if options.energy is not None:
        return [at(rank) for rank in budget.by_energy(shares, options.energy, options.multiple)]
    config, most = source.transformer, max(map(len, shares))
    by_rank = [at(max(rank, 1)) for rank in range(most + 1)]
    bytes_of = budget.bytes_by_rank(config, by_rank, _DTYPE)
    allowed = int(options.cache * formulas.cache_bytes_per_token(config, _DTYPE))
    return [at(rank) for rank in budget.within(shares, bytes_of, allowed, options.multiple)]


@contextlib.contextmanager
def _tokenizer_file(model: Model) -> Iterator[epath.Path]:
    """The model's tokenizer as a file, for the time of the block."""
    with tempfile.TemporaryDirectory() as folder:
        file = epath.Path(folder) / manifest.TOKENIZER
        file.write_text(model.tokenizer_json)
        yield file


def _rows(options: argparse.Namespace, model: Model, *, key: str, split: str) -> np.ndarray:
    """[B, T + 1] of the text that an option names."""
    tokens = getattr(options, f"{key}_tokens")
    model.transformer.check_length(options.row_length)
    source = getattr(options, key)
    if not source:
        raise UserError(f"--{key}='': give text, as 'embedded' or a file")
    with _tokenizer_file(model) as tokenizer:
        found = dict(split=split, length=options.row_length, tokens=tokens, key=key)
        return perplexity.rows(source, tokenizer, **found)


def _record(
    options: argparse.Namespace, method: Method | None, source: Model, model: Model
) -> dict:
    """What conversion.json keeps; errors come in when the weights are read."""
    of = lambda m: formulas.cache_bytes_per_token(m.transformer, _DTYPE)
    record = dict(
        source=source.name,
        method=options.method,
        cache_bytes_per_token=dict(before=of(source), after=of(model)),
        made_by=provenance.provenance(),
    )
    if method is None:
        return record
    text = {} if method.objective == "weights" else dict(text=options.calibrate)
    return record | dict(options=dataclasses.asdict(method) | text, errors=model.errors)


def _report(out: Output, options: argparse.Namespace, source: Model, result: dict) -> None:
    """Prints what the conversion made, and what it cost."""
    before, after = result["cache_bytes_per_token"].values()
    out.say(f"written: {options.out}, from {source.name}")
    if options.method != "none":
        names = list(result["errors"][0])
        rows = [
            (layer, *(f"{errors[name]:.4f}" for name in names))
            for layer, errors in sorted(result["errors"].items())
        ]
        title = "Share of the energy that is lost"
        out.show(Table(title, ["layer", *names], rows))
    if "perplexity" in result:
        found = result["perplexity"]
        shown = f"{found['before']:.3f} before, " if "before" in found else ""
        shown += f"{found['after']:.3f}" + (" after" if "before" in found else "")
        out.say(f"\nperplexity of held-out text ({options.evaluate}): {shown}")
    share = f", {after / before:.3f} of {before:,}" if after != before else ""
    out.say(f"\ncache: {after:,} bytes per token in bfloat16{share}")
    out.say(f"\npython -m kvjax.generate --workdir={options.out} --prompt='Once'", wrap=False)
    out.result(result)


def _perplexities(
    options: argparse.Namespace, source: Model, rows_BT: np.ndarray
) -> dict[str, float]:
    """By "before" and "after", where something was converted, in float32."""
    compute, found = Compute(query_chunk=64), {}
    if options.method != "none":
        found["before"] = perplexity.perplexity(model_lib.transformer(source), compute, rows_BT)
    converted = model_lib.transformer(model_lib.open(options.out))
    return found | dict(after=perplexity.perplexity(converted, compute, rows_BT))


if __name__ == "__main__":
    command_line.run(main)
