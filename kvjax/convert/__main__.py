"""A published model in, a workdir out; its KV cache made smaller on the way, if asked.

    python -m kvjax.convert --source=~/models/SmolLM2-135M --out=runs/smollm2
    python -m kvjax.convert --source=runs/smollm2 --out=runs/half --cache=0.5
    python -m kvjax.convert --source=runs/smollm2 --out=runs/thin --method=thin_keys --rank=32
    python -m kvjax.convert --source=runs/smollm2 --out=runs/lrkv --method=lrkv --rank=16

A source is a folder of Hugging Face's (config.json, safetensors, tokenizer.json), a GGUF file, or a
workdir. Then `python -m kvjax.generate --workdir=OUT` generates, from the smaller cache, and
`python -m kvjax.main --config=OUT/recover.py` tunes what the conversion made.
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import shlex
import tempfile

from etils import epath
import jax.numpy as jnp
import numpy as np

from kvjax.convert import (
    budget,
    calibration,
    into_workdir,
    model as model_lib,
    options as options_lib,
    perplexity,
)
from kvjax.convert.budget import RankChoices
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import Method, ThinKeys
from kvjax.convert.model import LazyModel
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.foundation import command_line, provenance, runtime
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.output import Output, Table

_DTYPE = jnp.dtype(jnp.bfloat16)  # of the cache, for figures


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--source", default="", help="a folder, a .gguf file, or a workdir")
    add("--out", default="", help="the workdir to write; nothing may be there")
    text = "(none: as it is; with --cache thin_keys)"
    add("--method", help=f"{', '.join(options_lib.METHODS)} {text}")
    group = parser.add_argument_group("thin_keys and lrkv")
    add = group.add_argument
    add("--rank", type=int, help="channels of a latent, or of a head's residual")
    add("--energy", type=float, help="instead: the share that every layer keeps, of its own rank")
    text = "instead: the share of the cache; its ranks are those that cost outputs least"
    add("--cache", type=float, help=text)
    add("--multiple", type=int, default=8, help="of which ranks by energy are (8)")
    text = "what counts: errors of the weights, of keys and values (inputs), of logits and outputs"
    add("--objective", default="outputs", help=f"{text} (outputs)")
    text = "thin_keys: a latent per_head, or one joint (joint; with --rank per_head)"
    add("--mode", help=text)
    text = "thin_keys: key, or key_value; query, both (it and the key), value as controls"
    add("--part", help=f"{text} (key; with --cache key_value)")
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
    add("--text_key", default="text", help="JSON key or Parquet column of either's text (text)")
    return parser


def main(arguments: list[str]) -> None:
    """Converts; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    source = "a folder, a .gguf file or a workdir"
    command_line.require(options, source=source, out="a new folder")
    options_lib.fill_defaults(options, _parser().get_default)
    method = options_lib.make_method(options)
    if options.evaluate_tokens is None:
        wanted = method or options.evaluate != _parser().get_default("evaluate")
        options.evaluate_tokens = 16_384 if wanted else 0
    target = into_workdir.check(options.out)
    runtime.check_checkpoints("--out", target)
    runtime.start()
    source = model = _opened(options.source)
    if method is not None:
        _converted(source, method, None)  # raises what is wrong before text is read
        layers = _choices(options, method, source)
    calibrating_BT = evaluated_BT = moments = None
    if method is not None and method.objective != "weights":
        calibrating_BT = _rows(options, source, key="calibrate", split="train")
    if options.evaluate_tokens:
        evaluated_BT = _rows(options, source, key="evaluate", split="validation")
    if calibrating_BT is not None:
        moments = calibration.moments(source, calibrating_BT[:, :-1])
    if method is not None and options_lib.splits_budget(options):
        method = _split(options, method, source, moments, calibrating_BT)
        model = _converted(source, method, moments)
    elif method is not None:
        model = _converted(
            source, method, moments, _ranks(options, method, source, moments, layers)
        )
    record = _record(options, method, source, model)
    for key, rows_BT in dict(calibrated=calibrating_BT, evaluated=evaluated_BT).items():
        if rows_BT is not None:
            record[key] = dict(text=getattr(options, key[:-1]), tokens=rows_BT[:, 1:].size)
    before = {}
    if method is not None and evaluated_BT is not None:
        before = dict(before=perplexity.perplexity(source, evaluated_BT))
    tunes_values = method is not None and method.changes_values
    into_workdir.write(model, target, record, tune="qkv" if tunes_values else "qk")
    if evaluated_BT is not None:
        try:
            after = perplexity.perplexity(model_lib.open(str(target)), evaluated_BT)
        except UserError as error:
            raise UserError(f"{options.out} was written; {error}") from error
        record["perplexity"] = before | dict(after=after)
        try:
            into_workdir.write_record(target, record)
        except OSError as error:
            warn(f"{target / into_workdir.RECORD} lacks the perplexity: {error.strerror or error}")
    _report(out, options, source, record)


def _converted(
    source: LazyModel, method: Method, moments: list | None, ranks: Sequence[int] | None = None
) -> ConvertedModel:
    """The model with a method in every layer, of its own rank or of one for each layer."""
    ranks = ranks or [method.rank] * source.transformer.block.num_layers
    by_layer = [dataclasses.replace(method, rank=rank) for rank in ranks]
    return ConvertedModel(source, by_layer, moments)


def _cache_bytes(model: LazyModel) -> int:
    """Per token, all layers."""
    return formulas.cache_bytes_per_token(model.transformer, _DTYPE)


def _opened(source: str) -> LazyModel:
    """The model of the option; what is wrong with it names the option."""
    try:
        return model_lib.open(source)
    except UserError as error:
        told = str(error) if "--source" in str(error) else f"--source={source}: {error}"
        raise UserError(told) from error


def _choices(
    options: argparse.Namespace, method: Method, source: LazyModel
) -> list[RankChoices] | None:
    """Each layer's ranks to choose from, None with --rank.

    Raises:
      UserError: the cache would be larger than the source's, or than --cache.
    """
    config = source.transformer
    if options.rank is not None:
        for mechanism in config.mechanisms:
            budget.check_smaller(config, mechanism, method, _DTYPE, "rank")
        return None
    layers = budget.rank_choices(config, method, options.multiple, _DTYPE)
    if options.cache is not None:
        budget.check_budget(layers, _allowed(options, source))
    return layers


def _allowed(options: argparse.Namespace, source: LazyModel) -> int:
    """Bytes per token."""
    return int(options.cache * _cache_bytes(source) + 1e-6)  # 0.7 is not quite 0.7


def _ranks(
    options: argparse.Namespace,
    method: Method,
    source: LazyModel,
    moments: list | None,
    layers: list[RankChoices] | None,
) -> list[int] | None:
    """Each layer's own rank; None: that of the method."""
    if layers is None:
        return None
    lost = budget.energy_losses(source, method, moments, layers)
    if options.energy is not None:
        ranks = budget.ranks_by_energy(layers, lost, options.energy)
        _warn_of_less(layers, lost, ranks, options.energy)
        return ranks
    return budget.ranks_within_budget(layers, lost, _allowed(options, source))


def _split(
    options: argparse.Namespace,
    method: ThinKeys,
    source: LazyModel,
    moments: list | None,
    calibrating_BT: np.ndarray | None,
) -> ThinKeys:
    """Returns the method with its ranks of keys and of values, the same in every layer."""
    sensitivities = None
    if method.objective == "outputs":
        sensitivities = calibration.sensitivities(source, calibrating_BT[:, :-1])
    limits = dict(multiple=options.multiple, budget=_allowed(options, source), dtype=_DTYPE)
    return budget.split_budget(source, method, moments, sensitivities, **limits)


def _warn_of_less(
    layers: list[RankChoices], lost: list[list[float]], ranks: list[int], energy: float
) -> None:
    """Tells of layers that keep less of their energy at any rank that makes the cache smaller."""
    short = []
    for i, (layer, of, rank) in enumerate(zip(layers, lost, ranks, strict=True)):
        kept = 1 - of[layer.ranks.index(rank)]
        if kept < energy - 1e-9:
            short.append(f"layer {i} {kept:.4f} at rank {rank}")
    if short:
        more = f" and {len(short) - 4} more" if len(short) > 4 else ""
        warn(
            f"--energy={energy}: no rank that makes the cache smaller keeps so much: "
            f"{', '.join(short[:4])}{more}"
        )


@contextlib.contextmanager
def _tokenizer_file(model: LazyModel) -> Iterator[epath.Path]:
    """The model's tokenizer as a file, for the time of the block."""
    with tempfile.TemporaryDirectory() as folder:
        file = epath.Path(folder) / manifest.TOKENIZER
        file.write_text(model.tokenizer_json)
        yield file


def _rows(options: argparse.Namespace, model: LazyModel, *, key: str, split: str) -> np.ndarray:
    """[B, T + 1] of the text that an option names."""
    tokens = getattr(options, f"{key}_tokens")
    try:
        model.transformer.check_length(options.row_length)
    except UserError as error:
        raise UserError(perplexity.name_options(str(error), key)) from error
    source = getattr(options, key)
    if not source:
        raise UserError(f"--{key}='': give text, as 'embedded' or a file")
    with _tokenizer_file(model) as tokenizer:
        asked_for = dict(split=split, length=options.row_length, tokens=tokens, key=key)
        rows_BT = perplexity.rows(source, tokenizer, text_key=options.text_key, **asked_for)
    if options.row_length > model.context:
        warn(
            f"--row_length = {options.row_length}: {model.name} was trained on rows of "
            f"{model.context:,} tokens"
        )
    if rows_BT[:, 1:].size < tokens:
        warn(f"--{key}={source}: has {rows_BT[:, 1:].size:,} tokens of the {tokens:,} asked for")
    return rows_BT


def _record(
    options: argparse.Namespace, method: Method | None, source: LazyModel, model: LazyModel
) -> dict:
    """What conversion.json keeps; errors come in when the weights are read."""
    record = dict(
        source=source.name,
        method=options.method,
        cache_bytes_per_token=dict(before=_cache_bytes(source), after=_cache_bytes(model)),
        cache_dtype=_DTYPE.name,
        made_by=provenance.provenance(),
    )
    if method is None:
        return record
    record |= dict(options=options_lib.recorded(options), ranks=model.ranks, errors=model.errors)
    if options_lib.splits_budget(options):
        record["value_ranks"] = [method.value_rank] * len(model.ranks)  # 0: values as they are
    return record


def _report(out: Output, options: argparse.Namespace, source: LazyModel, result: dict) -> None:
    """Prints what the conversion made, and what it cost."""
    before, after = result["cache_bytes_per_token"].values()
    out.say(f"written: {options.out}, from {source.name}")
    if "calibrated" in result:
        found = result["calibrated"]
        out.say(f"calibrated on {found['tokens']:,} tokens ({found['text']})")
    if "value_ranks" in result:
        of_values = result["value_ranks"][0] or "that of the source"
        out.say(f"in every layer keys have rank {result['ranks'][0]}, values {of_values}")
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
        of = f"{result['evaluated']['tokens']:,} held-out tokens ({options.evaluate})"
        out.say(f"\nperplexity of {of}: {shown}")
    share = f", {after / before:.3f} of {before:,}" if after != before else ""
    out.say(f"\ncache: {after:,} bytes per token in bfloat16{share}")
    workdir = shlex.quote(options.out)
    out.say(f"\npython -m kvjax.generate --workdir={workdir} --prompt='Once'", wrap=False)
    out.result(result)


if __name__ == "__main__":
    command_line.run(main)
