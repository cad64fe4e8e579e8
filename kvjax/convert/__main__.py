"""Imports a published model into a workdir; converts it to a smaller KV cache on request.

    # the model as it was published
    python -m kvjax.convert --source=~/models/SmolLM2-135M --out=runs/smollm2
    # half the cache
    python -m kvjax.convert --source=runs/smollm2 --out=runs/half --cache=0.5
    # keys of 32 channels in every head
    python -m kvjax.convert --source=runs/smollm2 --out=runs/thin --method=thin_keys --rank=32
    # MLA: all heads share one latent and one RoPE key, which DeepSeek's engines cache
    python -m kvjax.convert --source=runs/smollm2 --out=runs/mla --method=mla --cache=0.5
    # LRKV: all heads share one key and one value, and each has a residual of rank 16
    python -m kvjax.convert --source=runs/smollm2 --out=runs/lrkv --method=lrkv --rank=16

The source is a Hugging Face folder (config.json, safetensors, tokenizer.json), a GGUF file, a
hub's model (hf://OWNER/NAME[@REVISION], read from Hugging Face's cache or downloaded into it)
or a workdir. Afterwards `python -m kvjax.generate --workdir=OUT` generates from the smaller cache,
and `python -m kvjax.main --config=OUT/recover.py` fine-tunes the converted weights.
"""

import argparse
import shlex

import numpy as np

from kvjax.convert import (
    calibration,
    choice,
    into_workdir,
    model as model_lib,
    options as options_lib,
    perplexity,
    refit,
)
from kvjax.convert.choice import Choice
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.methods import ThinKeys
from kvjax.convert.model import LazyModel
from kvjax.data import config as config_lib
from kvjax.foundation import command_line, provenance, runtime
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.output import Output, Table

_CALIBRATION_TEXTS = "embedded,embedded:lookups"
_ATTENTION_TOKENS = 16_384  # in the long rows on which attention is measured


def make_parser() -> command_line.Parser:
    """Returns the parser of the command's options."""
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
    text = "weights: minimise the error of the weights; inputs: of keys and values on the "
    text += "calibration text; outputs: of attention's logits and outputs on that text (outputs)"
    add("--objective", default="outputs", help=text)
    group = parser.add_argument_group(
        "size of the cache",
        "Give one of --rank, --energy and --cache; --cache=0.5 halves the cache.",
    )
    add = group.add_argument
    text = "rank in every layer: channels of a latent (thin_keys, mla), channels of each head's "
    text += "residual (lrkv), or number of KV heads (gqa)"
    add("--rank", type=int, help=text)
    text = "share of each layer's energy (squared singular values) to keep, such as 0.95; each "
    add("--energy", type=float, help=f"{text}layer gets the smallest rank that does")
    text = "size of the new cache as a share of the source's, such as 0.5; ranks are chosen to "
    add("--cache", type=float, help=f"{text}minimise the error")
    text = "choose ranks among the multiples of N, with --energy or --cache (8)"
    add("--multiple", type=int, default=8, metavar="N", help=text)
    group = parser.add_argument_group("only with --method=thin_keys")
    add = group.add_argument
    text = "per_head: one latent for each KV head; joint: one for all KV heads of a layer "
    add("--mode", help=f"{text}(joint; per_head with --rank)")
    text = "projections to factor: key, or key_value for keys and values; for controlled "
    text += "experiments also query, both (query and key), value (key; key_value with --cache)"
    add("--part", help=text)
    add("--value_rank", type=int, help="rank of values, with --part=key_value (--rank)")
    group = parser.add_argument_group("only with --method=mla")
    text = "channels of the RoPE key that all heads share, an even number (as many as a head has; "
    text += "with --cache all, half or a quarter of them, whichever loses least)"
    group.add_argument("--rope_dim", type=int, default=0, help=text)
    group = parser.add_argument_group("only with --method=mla and auto")
    text = "measure how far back heads attend on rows of at most this many tokens; longer contexts "
    text += "may lose more (4096, or the model's training context if that is shorter)"
    group.add_argument("--attention_length", type=int, default=4096, help=text)
    group = parser.add_argument_group("only with --method=lrkv")
    add = group.add_argument
    add("--bases", type=int, default=1, help="number of bases that the KV heads share (1)")
    text = "first rotate each head's channels so that the heads' keys and values resemble each "
    text += "other; the rotations alone do not change the model (yes)"
    add("--align", action=argparse.BooleanOptionalAction, default=True, help=text)
    group = parser.add_argument_group(
        "texts", "A text is 'embedded', a file, or a pattern, as for config.data.source."
    )
    add = group.add_argument
    text = "texts that the method is fitted to, with an equal share of each; embedded:lookups has "
    text += f"facts that are stated twice, to preserve retrieval ({_CALIBRATION_TEXTS})"
    add("--calibrate", default=_CALIBRATION_TEXTS, help=text)
    text = "number of calibration tokens (32768)"
    add("--calibrate_tokens", type=int, default=32_768, help=text)
    text = "regress each layer's output projection on the original attention's outputs for the "
    text += "calibration text, where that lowers the error on held-out rows (yes; no with "
    text += "--method=gqa or --objective=weights)"
    add("--refit", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "text whose validation split measures the perplexity before and after (embedded)"
    add("--evaluate", default="embedded", help=text)
    text = "number of tokens that measure perplexity; 0: measure none (16384 with a method, else 0)"
    add("--evaluate_tokens", type=int, help=text)
    add("--row_length", type=int, default=512, help="tokens per row of both texts (512)")
    text = "name of the JSON key or Parquet column that holds the text (text)"
    add("--text_key", default="text", help=text)
    return parser


def main(arguments: list[str]) -> None:
    """Converts a model; see the module's docstring."""
    options = make_parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    source = "a folder, a .gguf file, hf://OWNER/NAME or a workdir"
    command_line.require(options, source=source, out="a new folder")
    options_lib.fill_defaults(options, make_parser().get_default)
    converts = options.method != "none"
    if options.evaluate_tokens is None:
        evaluates = converts or options.evaluate != make_parser().get_default("evaluate")
        options.evaluate_tokens = 16_384 if evaluates else 0
    target = into_workdir.check(options.out)
    runtime.check_checkpoints("--out", target)
    runtime.start()
    source = model = open_model(options.source, "--source")
    chosen = choice.Choice([])
    if converts:
        choice.check(options, source)
    calibrating_BT = evaluated_BT = long_BT = moments = None
    if converts and options.objective != "weights":
        calibrating_BT = _rows(options, source, key="calibrate")
        if options.refit and len(calibrating_BT) < refit.LEAST_ROWS:
            raise UserError(
                "--refit: needs two rows of calibration text: give a longer --calibrate, more "
                "--calibrate_tokens, or --no-refit"
            )
        if options.method in ("mla", "auto"):
            long_BT = long_rows(options, source, calibrating_BT)
    if options.evaluate_tokens:
        evaluated_BT = _rows(options, source, key="evaluate")
    if calibrating_BT is not None:
        moments = calibration.moments(source, calibrating_BT[:, :-1])
    if converts:
        chosen = choice.choose(options, source, moments, calibrating_BT, long_BT)
        regressing_BT = calibrating_BT[:, :-1] if options.refit else None
        model = refit.converted_model(source, chosen.methods, moments, regressing_BT)
    record = _record(options, chosen, source, model)
    if calibrating_BT is not None:
        record["calibrated"] = dict(text=options.calibrate, tokens=calibrating_BT[:, 1:].size)
    if evaluated_BT is not None:
        record["evaluated"] = dict(text=options.evaluate, tokens=evaluated_BT[:, 1:].size)
    measured = {}
    if converts and evaluated_BT is not None:
        measured["before"] = perplexity.perplexity(source, evaluated_BT)
    tunes_values = converts and chosen.methods[0].changes_values
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


def open_model(source: str, option: str) -> LazyModel:
    """Opens the model that an option names; errors name the option."""
    try:
        return model_lib.open(source, option)
    except UserError as error:
        message = str(error)
        if option not in message:
            message = f"{option}={source}: {message}"
        raise UserError(message) from error


def _rows(options: argparse.Namespace, model: LazyModel, *, key: str) -> np.ndarray:
    """Returns [B, T + 1] rows of the text that an option names."""
    tokens = getattr(options, f"{key}_tokens")
    try:
        model.transformer.check_length(options.row_length)
    except UserError as error:
        raise UserError(perplexity.name_options(str(error), key)) from error
    source = getattr(options, key)
    if not config_lib.split_source(source):
        raise UserError(f"--{key}={source!r}: give a text: 'embedded' or a file")
    size = dict(length=options.row_length, tokens=tokens, text_key=options.text_key)
    if key == "calibrate":
        rows_BT = perplexity.calibration_rows(model, source, **size)
    else:
        rows_BT = perplexity.model_rows(model, source, split="validation", key=key, **size)
    if options.row_length > model.context:
        warn(
            f"--row_length = {options.row_length}: {model.name} was trained on rows of "
            f"{model.context:,} tokens"
        )
    if rows_BT[:, 1:].size < tokens:
        size = rows_BT[:, 1:].size
        warn(f"--{key}={source}: has {size:,} tokens, fewer than --{key}_tokens = {tokens:,}")
    return rows_BT


def long_rows(options: argparse.Namespace, model: LazyModel, rows_BT: np.ndarray) -> np.ndarray:
    """Returns [B, T + 1] rows of the calibration text, as long as the model's later contexts.

    T is --attention_length, or less if the model's context or the text is shorter.

    Args:
      rows_BT: rows of --row_length tokens, which are returned if there are no longer rows.
    """
    length = longest = min(options.attention_length, model.context)
    while length > options.row_length:
        size = dict(length=length, tokens=_ATTENTION_TOKENS, text_key=options.text_key)
        try:
            rows_BT = perplexity.calibration_rows(model, options.calibrate, all_texts=False, **size)
            break
        except perplexity.TooShortError:  # shorter rows have been read before
            length //= 2
    texts = config_lib.split_source(options.calibrate)  # whose rows alternate
    rows_BT = rows_BT[: max(len(texts), _ATTENTION_TOKENS // (rows_BT.shape[1] - 1))]
    if (measured := rows_BT.shape[1] - 1) < longest:
        warn(
            f"--calibrate={options.calibrate}: too short for rows of {longest:,} tokens: attention "
            f"is measured on rows of {measured:,}, and longer contexts may lose more"
        )
    return rows_BT


def _record(
    options: argparse.Namespace, chosen: Choice, source: LazyModel, model: LazyModel
) -> dict:
    """Returns the contents of conversion.json; its errors are filled in as weights are read."""
    sizes = dict(before=choice.cache_bytes(source), after=choice.cache_bytes(model))
    record = dict(
        source=source.name,
        method=options.method,
        cache_bytes_per_token=sizes,
        cache_dtype=choice.DTYPE.name,
        made_by=provenance.provenance(),
    )
    if not chosen.methods:
        return record
    record |= dict(options=options_lib.recorded(options), ranks=model.ranks, errors=model.errors)
    method, splits = chosen.methods[0], options_lib.splits_budget(options)
    if isinstance(method, ThinKeys) and (splits or options.method == "auto"):
        record["value_ranks"] = [method.value_rank] * len(model.ranks)  # 0: values not factored
    if isinstance(method, LatentAttention):
        record["rope_dim"] = model.transformer.mechanisms[0].rope_key_dim
    if options.refit:
        record["outputs_lost"] = model.outputs_lost
    if chosen.compared:
        record["compared"] = dict(chosen.compared)
    return record


def _report(out: Output, options: argparse.Namespace, source: LazyModel, result: dict) -> None:
    """Prints the output folder, energy lost per layer, perplexity and cache size."""
    before, after = result["cache_bytes_per_token"].values()
    out.say(f"written: {options.out}, from {source.name}")
    if "calibrated" in result:
        text = result["calibrated"]
        out.say(f"calibrated on {text['tokens']:,} tokens ({text['text']})")
    if "compared" in result:
        rows = [(title, f"{measured:.3f}") for title, measured in result["compared"].items()]
        title = "Perplexity on a part of the calibration text"
        out.show(Table(title, ["method", "perplexity"], rows))
    if "rope_dim" in result:
        latent, rope = result["ranks"][0], result["rope_dim"]
        out.say(f"every layer caches a latent of {latent} channels and a RoPE key of {rope}")
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
    if "outputs_lost" in result:
        pair = np.mean(list(result["outputs_lost"].values()), axis=0)
        out.say(
            f"\nlost share of attention's outputs, mean over layers: {pair[0]:.4f} before the "
            f"regression, {pair[1]:.4f} after (on held-out calibration rows)"
        )
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
