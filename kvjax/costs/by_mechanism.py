"""Prints a table with one row per mechanism, relative to MHA, for a published model or configs."""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses

import jax.numpy as jnp

from kvjax import config as config_lib
from kvjax.attention import named
from kvjax.cache import quantized
from kvjax.costs import formulas, methods
from kvjax.costs.methods import Row
from kvjax.costs.shape import Shape
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware.datasheets import Device
from kvjax.model.config import TransformerConfig

DTYPES = ("bfloat16", "float32")
_BFLOAT16 = jnp.dtype("bfloat16")
CONTEXT = 32_768  # cached tokens per sequence for configs, whose training rows are shorter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sequences, devices and dtypes that the table is computed for.

    Attributes:
      context: cached tokens per sequence.
      on: devices whose memory holds weights and cache.
      chips: number of chips of each device.
      dtype: dtype of weights and, unless `cache_dtype` is given, of the cache.
      cache_dtype: int8 or int4 for a quantised cache; "": `dtype`.
      batch: sequences decoded together.
    """

    context: int
    on: Sequence[Device] = ()
    chips: int = 1
    dtype: str = DTYPES[0]
    cache_dtype: str = ""
    batch: int = 1

    def figures(self, row: Row, mha: Row, weight_bytes: int) -> dict:
        """Returns a row's cache sizes by dtype, their ratio to MHA's, and tokens by device."""
        dtype, bits = jnp.dtype(self.dtype), quantized.bits_of(self.cache_dtype)
        free = {d.name: methods.free_bytes(d, self.chips, weight_bytes) for d in self.on}
        whole = {name: row.cache_bytes(jnp.dtype(name), self.context) for name in DTYPES}
        if self.cache_dtype:
            whole[self.cache_dtype] = _possible(row.cache_bytes, dtype, self.context, bits)
        return dict(
            cache_bytes_per_token={name: row.cache_bytes(jnp.dtype(name)) for name in DTYPES}
            | {
                name: _possible(row.cache_bytes, dtype, 1, bits)
                for name, bits in quantized.BITS.items()
            },
            cache_bytes=whole,
            of_mha=row.cache_bytes(_BFLOAT16) / mha.cache_bytes(_BFLOAT16),
            tokens={
                name: _possible(row.tokens, self.context, dtype, size, bits)
                for name, size in free.items()
            },
        )

    @property
    def _dtypes(self) -> tuple[str, ...]:
        """The dtypes of caches whose sizes at `context` tokens are shown."""
        return (*DTYPES, self.cache_dtype) if self.cache_dtype else DTYPES

    @property
    def header(self) -> list[str]:
        """The titles of `cells`."""
        chips = f"{self.chips} x " if self.chips > 1 else ""
        return [
            "cache bytes per token, bfloat16",
            "float32",
            *quantized.BITS,
            "of MHA",
            f"GB at {self.context:,} tokens, bfloat16",
            *self._dtypes[1:],
            *(f"tokens on {chips}{d.name}, {self.cache_dtype or self.dtype}" for d in self.on),
        ]

    def cells(self, figures: dict) -> list[str]:
        return [
            *("-" if n is None else f"{n:,}" for n in figures["cache_bytes_per_token"].values()),
            f"{figures['of_mha']:.3f}",
            *("-" if n is None else f"{n / 1e9:,.3f}" for n in figures["cache_bytes"].values()),
            *("-" if n is None else f"{n:,}" for n in figures["tokens"].values()),
        ]

    def note(self, weights: str) -> str:
        """Returns a note below the table on its columns of tokens.

        Args:
          weights: a phrase on how the memory of weights is counted.
        """
        memory = f"{self.chips} chips' memory" if self.chips > 1 else "one chip's memory"
        share = f"{1 - formulas.RESERVE:.0%}"
        return f"\nTokens fit in {share} of {memory}, {weights}; 1 GB = 10^9 bytes"


def _possible(count: Callable[..., int], *arguments) -> int | None:
    """Returns the count; None if the mechanism cannot have such a quantised cache.

    int4 needs rows of an even number of channels.
    """
    try:
        return count(*arguments)
    except UserError:
        return None


def print_model(out: Output, shape: Shape, setting: Setting) -> None:
    """Prints the table of a published model: its own mechanism, and every method applied to it."""
    rows = methods.rows(shape)
    itemsize = jnp.dtype(setting.dtype).itemsize
    weights = shape.weight_bytes or itemsize * shape.parameters
    for row in rows:
        if row.own:  # refused if it cannot have such a cache; other rows then show "-"
            row.cache_bytes(_BFLOAT16, bits=quantized.bits_of(setting.cache_dtype))
    figures = [setting.figures(row, rows[0], weights) for row in rows]
    own = next(f for row, f in zip(rows, figures, strict=True) if row.own)
    for line in _about(shape, own, setting.context):
        out.say(line)
    cells = [(row.name, *setting.cells(f)) for row, f in zip(rows, figures, strict=True)]
    out.table(["mechanism", *setting.header], cells)
    if setting.on:
        source = "of its files" if shape.weight_bytes else f"in {setting.dtype}, by its config"
        text = f"beside {weights / 1e9:,.3f} GB of weights ({source})"
        out.say(setting.note(text if weights else "weights not counted"))
    out.result(
        dict(
            name="costs",
            model=shape.name,
            family=shape.family,
            layers=len(shape.layers) + sum(shape.others.values()),
            context=setting.context,
            weight_bytes=weights,
            dtype=setting.dtype,
            cache_dtype=setting.cache_dtype or setting.dtype,
            chips=setting.chips,
            rows=[
                dict(mechanism=row.name, own=row.own) | f
                for row, f in zip(rows, figures, strict=True)
            ],
        )
    )


def _about(shape: Shape, own: dict, context: int) -> list[str]:
    """Returns lines that describe a published model's layers and cache.

    Args:
      own: figures of the model's own mechanism.
    """
    first, family = shape.layers[0], f" ({shape.family})" if shape.family else ""
    heads = f"{first.num_heads} query heads"
    if first.latent:
        heads += f" that share a latent of {first.latent} and a RoPE key of {first.rope_key}"
    else:
        plural = "s" if first.kv_heads > 1 else ""
        heads += f", {first.kv_heads} KV head{plural} of {first.key_dim} channels"
    if len({dataclasses.replace(layer, window=0) for layer in shape.layers}) > 1:
        heads += " in the first"
    lines = [f"{shape.name}{family}: {len(shape.layers)} layers, {heads}"]
    windows = Counter(layer.window for layer in shape.layers if 0 < layer.window < context)
    lines += [f"{count} of them keep the last {size:,} tokens" for size, count in windows.items()]
    for kind, count in shape.others.items():
        lines.append(f"{count} more layers cache nothing per token: {kind}")
    left_out = [f"{k} = {v}" for k, v in shape.defaults.items() if type(v) is int]
    if left_out:
        text = ", ".join(left_out)
        lines.append(f"its config leaves out keys, whose defaults in {shape.family} are: {text}")
    per_token = [f"{own['cache_bytes_per_token'][name]:,}" for name in DTYPES]
    per_sequence = [f"{own['cache_bytes'][name] / 1e9:,.3f}" for name in DTYPES]
    lines.append(
        f"KV cache: {per_token[0]} bytes per token in bfloat16, {per_token[1]} in float32; "
        f"{context:,} tokens take {per_sequence[0]} GB in bfloat16, {per_sequence[1]} in float32"
    )
    return lines


def print_configs(
    out: Output, experiments: Sequence[config_lib.Experiment], setting: Setting
) -> list[dict]:
    """Prints the table of several configs; returns its figures, JSON-able.

    Args:
      experiments: the configs. If none is MHA, MHA with the sizes of the first one is added.
    """
    models = {experiment.name: experiment.model for experiment in experiments}
    mha = next((name for name, model in models.items() if _is_mha(model)), "")
    if not mha:
        mha, models = "MHA", dict(MHA=_as_mha(experiments[0].model)) | models
    rows = {name: _row(name, model) for name, model in models.items()}
    ordered = sorted(rows, key=lambda n: (n != mha, -rows[n].cache_bytes(_BFLOAT16)))
    length = experiments[0].data.sequence_length
    lengths = {experiment.name: experiment.data.sequence_length for experiment in experiments}
    dtype, bits, figures = jnp.dtype(setting.dtype), quantized.bits_of(setting.cache_dtype), []
    for name in ordered:
        model = models[name]
        shape = dict(length=setting.context, batch=setting.batch, dtype=dtype, cache_bits=bits)
        flops = formulas.training_flops_per_token(model, lengths.get(name, length))
        step = formulas.decode_cost(model, **shape)
        figures.append(
            dict(
                config=name,
                mechanism=model.mechanisms[0].title,
                parameters=formulas.parameters(model)["total"],
                training_flops_per_token=flops,
                **setting.figures(rows[name], rows[mha], formulas.weight_bytes(model, dtype)),
                least_ms={d.name: 1e3 * step.seconds(d) for d in setting.on if setting.chips == 1},
            )
        )
    titles = ["config", "mechanism", "parameters", "of MHA", "GFLOP per trained token", "of MHA"]
    times = [f"least ms per step of {setting.batch} on {name}" for name in figures[0]["least_ms"]]
    out.say(f"Every config of this scale, relative to {mha}")
    out.table([*titles, *setting.header, *times], [_cells(f, figures[0], setting) for f in figures])
    if setting.on:
        out.say(setting.note(f"beside the weights in {setting.dtype}"))
    return figures


def _cells(figures: dict, mha: dict, setting: Setting) -> list[str]:
    parameters, flops = figures["parameters"], figures["training_flops_per_token"]
    return [
        figures["config"],
        figures["mechanism"],
        f"{parameters:,}",
        f"{parameters / mha['parameters']:.3f}",
        f"{flops / 1e9:.3f}",
        f"{flops / mha['training_flops_per_token']:.3f}",
        *setting.cells(figures),
        *(f"{ms:.3g}" for ms in figures["least_ms"].values()),
    ]


def _row(name: str, model: TransformerConfig) -> Row:
    counts = Counter(model.mechanisms)  # kvjax's caches hold all tokens, also beyond a window
    return Row(name, tuple(((mechanism, 0), count) for mechanism, count in counts.items()))


def _is_mha(model: TransformerConfig) -> bool:
    return all(mechanism.title == "MHA" for mechanism in model.mechanisms)


def _as_mha(model: TransformerConfig) -> TransformerConfig:
    """Returns the model with its attention replaced by MHA with equally many heads."""
    mechanisms = tuple(
        dataclasses.replace(named.mha(m.num_heads, head_dim=m.value_dim), qk_norm=m.qk_norm)
        for m in model.mechanisms
    )
    return dataclasses.replace(model, mechanisms=mechanisms)
