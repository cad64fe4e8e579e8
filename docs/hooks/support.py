"""Tables of the support matrix: what works for which mechanism, by the code's own checks."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
import re

from flax import nnx
import jax
import jax.numpy as jnp

import kvjax
from kvjax import attention, cache
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import export, huggingface, methods
from kvjax.convert.architectures import FAMILIES
from kvjax.costs import formulas
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.gpu import attention as gpu
from kvjax.kernels.decode_attention.tpu import attention as tpu
from kvjax.layers import rope
from kvjax.layers.weight import InitRngs
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig

N, HEAD_DIM, D, CAPACITY, BASE = 16, 128, 2048, 4096, 10_000.0


def _on(kind: str) -> Callable:
    """Returns the GPU kernels' check on a card that need not be there."""

    def check(inputs, entry) -> None:
        card = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("gpu",), abstract_device=card)
        with jax.sharding.use_abstract_mesh(mesh):
            gpu.check(inputs, entry)

    return check


CHECKS = {"TPU": tpu.check, "Hopper": _on("NVIDIA H200"), "Ampere, Ada": _on("NVIDIA A100")}
# The mechanisms of the tables, with N = 16 heads of 128 channels and ranks as in published models.
ROWS: dict[str, MechanismConfig] = {
    "mha": kvjax.mha(N),
    "gqa": kvjax.gqa(N, kv_heads=4),
    "mqa": kvjax.mqa(N),
    "lrkv": kvjax.lrkv(N, rank=64),
    "grouped (LRKV x GQA)": kvjax.grouped(N, kv_heads=8, bases=2, rank=64),
    "thin_keys": kvjax.thin_keys(N, key_dim=32),
    "projection_sharing, kv": kvjax.projection_sharing(N, tie="kv"),
    "projection_sharing, qk": kvjax.projection_sharing(N, tie="qk"),
    "projection_sharing, qkv": kvjax.projection_sharing(N, tie="qkv"),
    "projection_sharing, qkv+": kvjax.projection_sharing(N, tie="qkv", channels=16),
    "factored": kvjax.factored(N, kv_heads=N, latents=N, key_rank=32),
    "mla": kvjax.mla(N, latent=512),
    "mla_lrkv": kvjax.mla_lrkv(N, latent=256, rank=16),
    "mla_paper": kvjax.mla_paper(N, latent=512),
    "gla": kvjax.gla(N, latents=2, latent=256),
    "mlra": kvjax.mlra(N, branches=2, latent=128),
    "gta": kvjax.gta(N, kv_heads=4),
    "shared_kv": kvjax.shared_kv(N, kv_heads=2),
    "mfa": kvjax.mfa(N, query_rank=1024),
    "mfa_kr": kvjax.mfa_kr(N, query_rank=1024),
    "tpa": kvjax.tpa(N, key_rank=2, value_rank=2),
}
_NAMED = {f"`{name}`": config for name, config in ROWS.items()}


def kernels() -> str:
    """Returns the table of caches, training and decode kernels of all mechanisms."""
    whole = entry_bytes(ROWS["mha"])

    def cells(config: MechanismConfig) -> list[str]:
        size, name = entry_bytes(config), layout(config)
        cache = [f"{size:,}", f"{size / whole:.1%}", f"[`{name}`](decode.md#{name})"]
        return [*cache, training(config), *(kernel(check, config) for check in CHECKS.values())]

    return table(["mechanism", "bytes", "of MHA", "layout", "training", *CHECKS], _NAMED, cells)


def formats() -> str:
    """Returns the table of export formats and conversions of all mechanisms."""

    def cells(config: MechanismConfig) -> list[str]:
        return [f"`{kind_of(config)}`", exported(config), factors(config), converted_by(config)]

    head = ["mechanism", "kind", "transformers", "factors", "converted by"]
    return table(head, _NAMED, cells)


def table[T](head: list[str], rows: Mapping[str, T], cells: Callable[[T], list[str]]) -> str:
    """Returns a Markdown table with the numbered reasons for each "no" below it."""
    notes: dict[str, int] = {}
    lines = [_line(head), _line(["---"] * len(head))]
    for name, row in rows.items():
        lines.append(_line([name, *(_mark(cell, notes) for cell in cells(row))]))
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in notes.items())])


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"


def _mark(outcome: str, notes: dict[str, int]) -> str:
    """Replaces "no: REASON" by "no" and the reason's number in `notes`."""
    if not outcome.startswith("no: "):
        return outcome
    reason = outcome.removeprefix("no: ")
    reason = re.sub(r"(config\.)?((attention|model)\.\w+) = .*?: ", r"`\2`: ", reason)
    return f"no ({notes.setdefault(reason, len(notes) + 1)})"


def kind_of(config: MechanismConfig) -> str:
    """Returns the value of config.attention.kind."""
    return next(kind for kind, cls in attention.MECHANISMS.items() if cls is type(config))


def entry_bytes(config: MechanismConfig) -> int:
    """Returns the bytes of a cached token of one layer in bfloat16."""
    return formulas.entry_bytes(config.entry(), jnp.bfloat16)


@functools.cache
def decode_inputs(config: MechanismConfig):
    """Returns the decode inputs and the cache of a layer, as shapes in bfloat16."""
    entry = cache.abstract([config], batch=1, capacity=CAPACITY, dtype=jnp.bfloat16).layers[0]

    def inputs():
        module = config.build(D, rngs=InitRngs(jax.random.key(0)))
        graph, weights = nnx.split(module)
        module = nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights))
        positions = rope.positions(jnp.zeros((1, 1), jnp.int32), config.rope_dim, BASE)
        q_BTNH, _ = module.project(jnp.zeros((1, 1, D), jnp.bfloat16), positions)
        return module.decode_inputs(q_BTNH, BASE)

    return jax.eval_shape(inputs), entry


def layout(config: MechanismConfig) -> str:
    """Returns the name in `kvjax.LAYOUTS` of the layout that decode attention reads."""
    inputs, _ = decode_inputs(config)
    names = [name for name, spec in kvjax.LAYOUTS.items() if spec.inputs is type(inputs)]
    if len(names) == 1:
        return names[0]
    return "latent" if len(config.entry()["latent"].shape) == 1 else "latents"


def training(config: MechanismConfig) -> str:
    """Says if a layer's gradients are defined when attention is masked by document."""

    def loss():
        layer = kvjax.Attention(config, D, rngs=nnx.Rngs(0))
        x_BTD, ids_BT = jnp.zeros((1, 128, D)), jnp.zeros((1, 128), jnp.int32)
        return nnx.grad(lambda layer: layer(x_BTD, segment_ids=ids_BT).sum())(layer)

    try:
        jax.eval_shape(loss)
    except ValueError as error:
        return f"no: {error}"
    return "yes"


def kernel(check, config: MechanismConfig) -> str:
    """Says if a kernel takes a bfloat16 cache of these sizes, by its own check."""
    inputs, entry = decode_inputs(config)
    try:
        check(inputs, entry)
    except NotImplementedError as error:
        kind = re.escape(inputs.kind(entry))
        reason = re.sub(
            rf"[;:] use .xla.$|, not {kind}|(?<=a cache) of kind '{kind}'", "", str(error)
        )
        return f"no: {reason.replace('a cache', 'such a cache')}"
    return "yes"


# -- published formats -----------------------------------------------------------------------------


class _Model:
    """A model without weights, with those attributes of `LazyModel` that exports read."""

    name, context, tokenizer_json, chat_template, token_files = "model", 2048, "{}", None, {}

    def __init__(self, config: MechanismConfig, block: BlockConfig):
        self.transformer = TransformerConfig(
            block=block, mechanisms=(config,) * block.num_layers, vocab_size=512
        )

    def parameters(self):
        shapes = parameters.shapes(self.transformer)
        return {path: (shape, jnp.dtype(jnp.bfloat16)) for path, shape in shapes.items()}


_RECIPE = BlockConfig(num_layers=2, d_model=D, mlp_dim=4 * D)
_LLAMA = dataclasses.replace(
    _RECIPE,
    norm_gain=True,
    embedding_norm=False,
    activation="swiglu",
    logit_softcap=0.0,
)


def exported(config: MechanismConfig) -> str:
    """Returns transformers' classes that hold the mechanism in NanoChat's or Llama's blocks."""
    found, reasons = [], []
    plain = dataclasses.replace(config, qk_norm="none")
    for given, block in ((config, _RECIPE), (plain, _LLAMA)):
        try:
            dense = huggingface.DenseModel(_Model(given, block)).transformer
            kind, _ = huggingface._family(dense, context=2048)
            found.append(FAMILIES[kind].class_name.removesuffix("ForCausalLM"))
        except UserError as error:
            reasons.append(str(error).split(" in NanoChat")[0])
    return ", ".join(dict.fromkeys(found)) or f"no: {reasons[0]}"


def factors(config: MechanismConfig) -> str:
    """Says if `export --format=factored` can write such a model."""
    try:
        export.factored(_Model(config, _RECIPE))
    except UserError as error:
        return f"no: {error}"
    return "yes"


# -- conversions -----------------------------------------------------------------------------------

_SOURCES = [
    kvjax.gqa(N, kv_heads=heads)
    for heads in (4, N)  # GQA and MHA, as published models have them
]


def converted_by(config: MechanismConfig) -> str:
    """Returns the options of `kvjax convert` whose result is of this mechanism."""
    found = {}
    for options, result in conversions():
        if _same(config, result):
            found[options] = None
    return ", ".join(f"`{options}`" for options in found)


@functools.cache
def conversions() -> list[tuple[str, MechanismConfig]]:
    """Returns pairs of `--method` options and the mechanism that they convert a layer to."""
    found = []
    parts = [part for part in methods.PARTS if part not in ("query", "both", "value")]  # controls
    for source, rope_here in itertools.product(_SOURCES, (True, False)):
        plain = dataclasses.replace(source, qk_norm="none")
        for mode, part in itertools.product(methods.MODES, parts):
            method = methods.ThinKeys(rank=32, mode=mode, part=part)
            options = "thin_keys" + (f" --mode={mode}" if mode != methods.ThinKeys.mode else "")
            options += f" --part={part}" if part != methods.ThinKeys.part else ""
            options += "" if rope_here else " (no RoPE)"
            found.append((options, method.mechanism(plain, rope=rope_here)))
        for bases in (1, 2):
            options = "lrkv" + (f" --bases={bases}" if bases > 1 else "")
            result = methods.LowRankKV(rank=64, bases=bases).mechanism(source, rope=rope_here)
            found.append((options, result))
    return found


def _same(config: MechanismConfig, other: MechanismConfig) -> bool:
    """Returns True for two configs of one mechanism, which may differ in sizes."""
    return _shape(config) == _shape(other)


def _shape(config: MechanismConfig) -> tuple:
    """Returns the properties that distinguish mechanisms of one config class."""
    get = functools.partial(getattr, config)
    if isinstance(config, attention.GroupedConfig):
        grouped = "one base" if get("num_bases") == 1 else "bases"
        return (
            "grouped",
            grouped if get("rank") else "",
            get("rank") > 0,
            get("key_dim") < get("value_dim"),
            get("tie"),
            get("query_rank") > 0,
            get("value_dim") < HEAD_DIM <= D // get("num_heads"),  # narrower heads
        )
    return (type(config).__name__,)
