"""Imports a published model into a workdir, and converts it to a smaller KV cache on request.

    # the model as it was published
    python -m kvjax.convert --source=~/models/SmolLM2-135M --out=runs/smollm2
    # half of its cache
    python -m kvjax.convert --source=runs/smollm2 --out=runs/half --cache=0.5
    # keys of 32 channels per head
    python -m kvjax.convert --source=runs/smollm2 --out=runs/thin --method=thin_keys --rank=32
    # a shared key and value, and residuals of rank 16
    python -m kvjax.convert --source=runs/smollm2 --out=runs/lrkv --method=lrkv --rank=16

The source is a Hugging Face folder (config.json, safetensors, tokenizer.json), a GGUF file, a
hub's model (hf://OWNER/NAME[@REVISION], read from Hugging Face's cache or downloaded into it)
or a workdir. Afterwards `python -m kvjax.generate --workdir=OUT` generates from the smaller cache,
and `python -m kvjax.main --config=OUT/recover.py` fine-tunes the converted weights.
"""

import argparse
from collections.abc import Sequence
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

_DTYPE = jnp.dtype(jnp.bfloat16)  # of the cache, for budgets and reported sizes


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument_group("model").add_argument
    add("--source", default="", help="published folder, .gguf file, hf://OWNER/NAME, or workdir")
    add("--out", default="", help="workdir to write; it must not exist")
    group = parser.add_argument_group(
        "method", "Without --method the model keeps its cache; --cache alone chooses thin_keys."
    )
    add = group.add_argument
    text = "method that makes the cache smaller (none; thin_keys with --cache)"
    add("--method", help=f"{', '.join(options_lib.METHODS)}: {text}")
    text = "what to change least: weights; inputs, which are keys and values on the calibration "
    text += "text; or outputs, which are attention's logits and outputs on it (outputs)"
    add("--objective", default="outputs", help=text)
    group = parser.add_argument_group(
        "size of the cache", "Give one of --rank, --energy and --cache: --cache=0.5 halves it."
    )
    add = group.add_argument
    text = "one rank for all layers: channels of a latent (thin_keys), or of each head's residual "
    add("--rank", type=int, help=f"{text}(lrkv)")
    text = "share of each layer's energy (squared singular values) to keep, as 0.95; ranks differ "
    add("--energy", type=float, help=f"{text}by layer")
    text = "size of the new cache as a share of the source's, as 0.5; ranks are chosen to change "
    add("--cache", type=float, help=f"{text}the model least")
    text = "ranks that --energy or --cache chooses are multiples of N (8)"
    add("--multiple", type=int, default=8, metavar="N", help=text)
    group = parser.add_argument_group("only with --method=thin_keys")
    add = group.add_argument
    text = (
        "per_head: each KV head has a latent of its own; joint: all KV heads of a layer share one "
    )
    add("--mode", help=f"{text}(joint; per_head with --rank)")
    text = (
        "what is made smaller: key, or key_value for keys and values; for controlled experiments "
    )
    text += "also query, both (query and key), value (key; key_value with --cache)"
    add("--part", help=text)
    text = "rank of values, if --part=key_value gives them another than keys (--rank)"
    add("--value_rank", type=int, help=text)
    group = parser.add_argument_group("only with --method=lrkv")
    add = group.add_argument
    add("--bases", type=int, default=1, help="number of bases that the KV heads share (1)")
    text = "first rotate the heads' channels so that their keys and values resemble each other; a "
    text += "rotation does not change the model (yes)"
    add("--align", action=argparse.BooleanOptionalAction, default=True, help=text)
    group = parser.add_argument_group(
        "texts", "A text is given as config.data.source is: 'embedded', a file, or a pattern."
    )
    add = group.add_argument
    add("--calibrate", default="embedded", help="text that the method is fitted to (embedded)")
    add("--calibrate_tokens", type=int, default=32_768, help="number of its tokens (32768)")
    text = "text whose validation split measures the perplexity before and after (embedded)"
    add("--evaluate", default="embedded", help=text)
    text = "number of its tokens; 0 measures nothing (16384 with a method, else 0)"
    add("--evaluate_tokens", type=int, help=text)
    add("--row_length", type=int, default=512, help="tokens per row of both texts (512)")
    text = "name of the JSON key or Parquet column that has both texts (text)"
    add("--text_key", default="text", help=text)
    return parser


def main(arguments: list[str]) -> None:
    """Converts a model; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    source = "a folder, a .gguf file, hf://OWNER/NAME or a workdir"
    command_line.require(options, source=source, out="a new folder")
    options_lib.fill_defaults(options, _parser().get_default)
    method = options_lib.make_method(options)
    if options.evaluate_tokens is None:
        evaluates = method or options.evaluate != _parser().get_default("evaluate")
        options.evaluate_tokens = 16_384 if evaluates else 0
    target = into_workdir.check(options.out)
    runtime.check_checkpoints("--out", target)
    runtime.start()
    source = model = _open(options.source)
    if method is not None:
        _convert(source, method, None)  # raises user errors before text is read
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
        model = _convert(source, method, moments)
    elif method is not None:
        model = _convert(source, method, moments, _ranks(options, method, source, moments, layers))
    record = _record(options, method, source, model)
    if calibrating_BT is not None:
        record["calibrated"] = dict(text=options.calibrate, tokens=calibrating_BT[:, 1:].size)
    if evaluated_BT is not None:
        record["evaluated"] = dict(text=options.evaluate, tokens=evaluated_BT[:, 1:].size)
    measured = {}
    if method is not None and evaluated_BT is not None:
        measured["before"] = perplexity.perplexity(source, evaluated_BT)
    tunes_values = method is not None and method.changes_values
    into_workdir.write(model, target, record, tune="qkv" if tunes_values else "qk")
    if evaluated_BT is not None:
        try:
            measured["after"] = perplexity.perplexity(model_lib.open(str(target)), evaluated_BT)
        except UserError as error:
            raise UserError(f"{options.out} was written; {error}") from error
        record["perplexity"] = measured
        try:
            into_workdir.write_record(target, record)
        except OSError as error:
            warn(f"{target / into_workdir.RECORD} lacks the perplexity: {error.strerror or error}")
    _report(out, options, source, record)


def _convert(
    source: LazyModel, method: Method, moments: list | None, ranks: Sequence[int] | None = None
) -> ConvertedModel:
    """Applies a method to every layer, with its own rank or one rank per layer."""
    ranks = ranks or [method.rank] * source.transformer.block.num_layers
    by_layer = [dataclasses.replace(method, rank=rank) for rank in ranks]
    return ConvertedModel(source, by_layer, moments)


def _cache_bytes(model: LazyModel) -> int:
    """Returns the cache bytes per token over all layers."""
    return formulas.cache_bytes_per_token(model.transformer, _DTYPE)


def _open(source: str) -> LazyModel:
    """Opens --source; errors name the option."""
    try:
        return model_lib.open(source)
    except UserError as error:
        message = str(error)
        if "--source" not in message:
            message = f"--source={source}: {message}"
        raise UserError(message) from error


def _choices(
    options: argparse.Namespace, method: Method, source: LazyModel
) -> list[RankChoices] | None:
    """Returns each layer's candidate ranks; None with --rank.

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
    """Returns the bytes per token that --cache allows."""
    return int(options.cache * _cache_bytes(source) + 1e-6)  # 0.7 * 10 rounds to below 7


def _ranks(
    options: argparse.Namespace,
    method: Method,
    source: LazyModel,
    moments: list | None,
    layers: list[RankChoices] | None,
) -> list[int] | None:
    """Returns each layer's rank; None if the method's rank holds for all."""
    if layers is None:
        return None
    lost = budget.energy_losses(source, method, moments, layers)
    if options.energy is not None:
        ranks = budget.ranks_by_energy(layers, lost, options.energy)
        _warn_of_shortfall(layers, lost, ranks, options.energy)
        return ranks
    return budget.ranks_within_budget(layers, lost, _allowed(options, source))


def _split(
    options: argparse.Namespace,
    method: ThinKeys,
    source: LazyModel,
    moments: list | None,
    calibrating_BT: np.ndarray | None,
) -> ThinKeys:
    """Returns the method with a rank of keys and a rank of values, equal in all layers."""
    sensitivities = None
    if method.objective == "outputs":
        sensitivities = calibration.sensitivities(source, calibrating_BT[:, :-1])
    return budget.split_budget(
        source,
        method,
        moments,
        sensitivities,
        multiple=options.multiple,
        budget=_allowed(options, source),
        dtype=_DTYPE,
    )


def _warn_of_shortfall(
    layers: list[RankChoices], lost: list[list[float]], ranks: list[int], energy: float
) -> None:
    """Warns of layers that keep less energy than --energy at every rank that shrinks the cache."""
    shortfalls = []
    for i, (layer, losses, rank) in enumerate(zip(layers, lost, ranks, strict=True)):
        kept = 1 - losses[layer.ranks.index(rank)]
        if kept < energy - 1e-9:
            shortfalls.append(f"layer {i} {kept:.4f} at rank {rank}")
    if shortfalls:
        more = f" and {len(shortfalls) - 4} more" if len(shortfalls) > 4 else ""
        warn(
            f"--energy={energy}: no rank that makes the cache smaller reaches it: "
            f"{', '.join(shortfalls[:4])}{more}"
        )


def _rows(options: argparse.Namespace, model: LazyModel, *, key: str, split: str) -> np.ndarray:
    """Returns [B, T + 1] rows of the text that an option names."""
    tokens = getattr(options, f"{key}_tokens")
    try:
        model.transformer.check_length(options.row_length)
    except UserError as error:
        raise UserError(perplexity.name_options(str(error), key)) from error
    source = getattr(options, key)
    if not source:
        raise UserError(f"--{key}='': give a text: 'embedded' or a file")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = epath.Path(folder) / manifest.TOKENIZER
        tokenizer.write_text(model.tokenizer_json)
        rows_BT = perplexity.rows(
            source,
            tokenizer,
            split=split,
            length=options.row_length,
            tokens=tokens,
            key=key,
            text_key=options.text_key,
        )
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
    """Returns the contents of conversion.json; errors are filled in while weights are read."""
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
        record["value_ranks"] = [method.value_rank] * len(model.ranks)  # 0: values not factored
    return record


def _report(out: Output, options: argparse.Namespace, source: LazyModel, result: dict) -> None:
    """Prints the output folder, energy lost per layer, perplexity and cache size."""
    before, after = result["cache_bytes_per_token"].values()
    out.say(f"written: {options.out}, from {source.name}")
    if "calibrated" in result:
        text = result["calibrated"]
        out.say(f"calibrated on {text['tokens']:,} tokens ({text['text']})")
    if "value_ranks" in result:
        value_rank = result["value_ranks"][0] or "full"
        out.say(f"ranks in every layer: keys {result['ranks'][0]}, values {value_rank}")
    if options.method != "none":
        names = list(result["errors"][0])
        rows = [
            (layer, *(f"{errors[name]:.4f}" for name in names))
            for layer, errors in sorted(result["errors"].items())
        ]
        title = "Share of energy lost"
        out.show(Table(title, ["layer", *names], rows))
    if "perplexity" in result:
        measured = result["perplexity"]
        shown = f"{measured['after']:.3f}"
        if "before" in measured:
            shown = f"{measured['before']:.3f} before, {shown} after"
        tokens = f"{result['evaluated']['tokens']:,} held-out tokens ({options.evaluate})"
        out.say(f"\nperplexity on {tokens}: {shown}")
    share = f", {after / before:.3f} of {before:,}" if after != before else ""
    out.say(f"\ncache: {after:,} bytes per token in bfloat16{share}")
    workdir = shlex.quote(options.out)
    out.say(f"\npython -m kvjax.generate --workdir={workdir} --prompt='Once'", wrap=False)
    out.result(result)


if __name__ == "__main__":
    command_line.run(main)
