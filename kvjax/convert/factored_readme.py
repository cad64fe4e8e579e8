"""README.md of an export with factors: tensors, formulas and cache of that model."""

import math

from kvjax.attention import MECHANISMS, FactoredConfig, GroupedConfig, MLAConfig, PaperMLAConfig
from kvjax.attention.mechanism import MechanismConfig, check_convertible
from kvjax.foundation import output
from kvjax.foundation.errors import UserError
from kvjax.layers import alibi, rope
from kvjax.layers.weight import LETTERS, Axes
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig


def text(name: str, config: TransformerConfig, *, context: int) -> str:
    """Returns the README of one model.

    Raises:
      UserError: a mechanism without formulas here.
    """
    check(config)
    parts = [
        f"# {name}",
        f"A language model of {config.block.num_layers} layers, trained on rows of {context:,} "
        "tokens, with its keys and values as factors, so that the KV cache is small. Written by "
        "kvjax, which reads it with `python -m kvjax.convert --source=FOLDER --out=WORKDIR`.",
        "## Tensors",
        "`config.json` has the options, `model.safetensors` (or the files in "
        "`model.safetensors.index.json`) the tensors, `tokenizer.json` the tokenizer. "
        "A weight `D -> N H` is a linear map, stored [D, N, H]: y[n, h] = Σ_d x[d] w[d, n, h]. "
        "`K: R -> H` is K maps, stored [K, R, H]; `N H` a vector.",
        *_tensors(config),
        "Letters: " + ", ".join(_letters(config)) + ".",
        "## Model",
        _model(config.block),
        "## Attention",
        *_attention(config),
        "## Cache",
        *_cache(config),
    ]
    return "\n\n".join(parts) + "\n"


def check(config: TransformerConfig) -> None:
    """Raises a UserError for a mechanism without formulas: its factors would be unreadable."""
    for mechanism in config.mechanisms:
        if type(mechanism) not in KINDS:
            kinds = {cls: kind for kind, cls in MECHANISMS.items()}
            raise UserError(
                f"config.attention.kind = {kinds[type(mechanism)]!r}: --format=factored describes "
                f"{', '.join(kinds[cls] for cls in KINDS)}"
            )
        check_convertible(mechanism, "--format=factored has no formulas for this key")


def _lines(*lines: str) -> str:
    """Returns lines as an indented code block, without empty ones."""
    return "\n".join(f"    {line}" for line in lines if line)


def _layers(config: TransformerConfig) -> list[str]:
    """Returns the layers of each segment, as "0 to 3"."""
    names, first = [], 0
    for _, length in config.layer_groups:
        names.append(f"{first} to {first + length - 1}" if length > 1 else f"{first}")
        first += length
    return names


def _tensors(config: TransformerConfig) -> list[str]:
    """Returns a table of the tensors outside the layers, and one per layer shape."""
    shapes, axes = parameters.abstract(config)
    outer = {key: value for key, value in shapes.items() if key != "segments"}
    parts = ["\n".join(_table("", outer, axes, front=0))]
    for i, layers in enumerate(_layers(config)):
        rows = _table("layers.{i}.", shapes["segments"][i], axes["segments"][i], front=1)
        parts += [f"With i from {layers}:" if "to" in layers else f"With i = {layers}:"]
        parts += ["\n".join(rows)]
    return parts


def _table(prefix: str, shapes: dict, axes: dict, *, front: int) -> list[str]:
    rows = [
        (f"`{prefix}{name}`", f"`{text}`", str(list(leaf.shape[front:])))
        for name, leaf, text in _leaves(shapes, axes)
    ]
    return output.markdown(("tensor", "axes", "shape"), rows)


def _leaves(shapes: dict, axes: dict, name: str = ""):
    for key, value in shapes.items():
        if isinstance(value, dict):
            yield from _leaves(value, axes[key], f"{name}{key}.")
        else:
            yield f"{name}{key}", value, axes[key]


def _letters(config: TransformerConfig) -> list[str]:
    """Returns the meanings of the axis letters in the tables."""
    used = set()
    shapes, axes = parameters.abstract(config)
    for _, _, text in _leaves(shapes, axes):
        used.update(Axes.parse(text).names)
    return [f"{letter} {meaning}" for letter, meaning in LETTERS.items() if letter in used]


def _model(block: BlockConfig) -> str:
    """Returns the formulas outside attention."""
    activation = dict(
        relu2="relu(x up)²",
        relu="relu(x up)",
        gelu="gelu_tanh(x up)",
        gelu_exact="gelu(x up)",
        swiglu="(silu(x gate) · (x up))",
    )
    meaning = dict(
        gelu="gelu_tanh(z) = z/2 · (1 + tanh(sqrt(2/π) · (z + 0.044715 z³)))",
        gelu_exact="gelu(z) = z/2 · (1 + erf(z / sqrt(2)))",
    )
    z, centred = ("z", ", z = x - mean(x)") if block.norm == "layer" else ("x", "")
    affine = " · gain" * block.norm_gain + " + bias" * block.norm_bias
    added = dict(learned=" + positions[t]", sinusoidal=" + sinusoids[t]").get(block.positions, "")
    head = "embeddingᵀ" if block.tied_head else "head"
    cap = block.logit_softcap
    return _lines(
        f"norm(x) = {z} / sqrt(mean({z}²) + {block.norm_epsilon:g}){affine}{centred}",
        f"x = embedding[token]{added}",
        "x = embedding_norm(x)" if block.embedding_norm else "",
        "sinusoids[t] has sin(t · 10000^(-2i/D)) in channel 2i, and its cosine in channel 2i + 1"
        if block.positions == "sinusoidal"
        else "",
        _layer(block.norm_after),
        f"mlp(x) = {activation[block.activation]} · down" + ", with biases" * block.bias,
        meaning.get(block.activation, ""),
        f"z = x {head}" if block.norm_after else f"z = final_norm(x) {head}",
        f"logits = {cap:g} tanh(z / {cap:g})" if cap else "logits = z",
    )


def _layer(norm_after: bool) -> str:
    if norm_after:
        parts = "x = attention_norm(x + attention(x)), then x = mlp_norm(x + mlp(x))"
    else:
        parts = "x = x + attention(attention_norm(x)), then x = x + mlp(mlp_norm(x))"
    return f"{parts}, in every layer"


def _attention(config: TransformerConfig) -> list[str]:
    """Returns the formulas of the mechanism, which has one kind in all layers."""
    mechanism, block = _richest(config), config.block
    formulas = KINDS[type(mechanism)]
    rope = block.positions == "rope"
    seen = (
        f"itself and the {block.window - 1} before it"
        if block.window
        else "itself and all before it"
    )
    parts = [
        _lines(
            *formulas(mechanism, rope),
            f"a_nts = {mechanism.scale:.9g} q_n k_k(n)ᵀ" + _bias_of_positions(mechanism),
            "attention(x)_t = Σ_n Σ_s softmax_s(a_nts) v_k(n),s out[n]"
            + " + out_bias" * mechanism.output_bias,
        ),
        f"q belongs to the query's position t, k and v to the key's position s; a token attends to "
        f"{seen}."
        + " A product with a weight that has a bias includes the bias." * mechanism.bias
        + " Layers without latents omit these terms." * (len(set(config.mechanisms)) > 1)
        + " Each norm has its own gain, such as `query_norm.gain`."
        * (mechanism.qk_norm == "rms_gain"),
    ]
    return [*parts, _rope(block, mechanism.rope_dim)] if rope else parts


def _richest(config: TransformerConfig) -> MechanismConfig:
    """Returns the mechanism with the most absorbed weights: some layers may have rank 0."""
    return max(config.mechanisms, key=lambda mechanism: len(mechanism.absorbed))


def _norm(mechanism: MechanismConfig, z: str = "z") -> str:
    """Returns the formula of the norm of queries and keys."""
    gain = {"rms_gain": " · gain"}.get(mechanism.qk_norm, "")
    return f"{z} / sqrt(mean({z}²) + {mechanism.norm_epsilon:g}){gain}"


def _rotated(mechanism: MechanismConfig, rope: bool) -> str:
    """Returns the definition of `rotated`."""
    normed = "z" if mechanism.qk_norm == "none" else _norm(mechanism)
    return "rotated(z) = " + (f"RoPE({normed})" if rope else normed)


def _bias_of_positions(mechanism: MechanismConfig) -> str:
    """Returns the formula of ALiBi, or of the "+" of projection sharing."""
    if getattr(mechanism, "alibi", False):
        slopes = ", ".join(f"{slope:g}" for slope in alibi.slopes(mechanism.num_heads))
        return f" - m_n (t - s), where m_n of head n is one of {slopes}"
    m = getattr(mechanism, "position_channels", 0)
    if not m:
        return ""
    half = m // 2
    return (
        f" mean(position_map) + Σ_c position_map[{half} + c] e_c(s) / {m}, c < {half}, where\n"
        f"        e_2i(s) = sin(s / 10000^(2i/{half})), e_2i+1(s) = cos of the same"
    )


def _grouped(c: GroupedConfig, rope: bool) -> list[str]:
    def residual(part):
        return f" + (x latent_{part}[k]) expand_{part}[k]" if c.rank else ""

    heads = c.num_kv_heads if c.rank else c.num_bases
    query = "base_key" if c.ties_queries else "query"
    unrotated = ", where RoPE leaves the residual and its query unrotated"
    return [
        _rotated(c, rope),
        f"q_n = rotated(x {query}[n])",
        f"K_k = x base_key[j(k)]{residual('key')}",
        "k_k = rotated(K_k)" + unrotated * (c.splits_rope and rope),
        "v_k = K_k" if c.ties_values else f"v_k = x base_value[j(k)]{residual('value')}",
        f"k(n) = n // {c.num_heads // heads}, j(k) = k // {heads // c.num_bases}",
    ]


def _factored(c: FactoredConfig, rope: bool) -> list[str]:
    def project(part, rank):
        return f"(x {part}[j(k)]) expand_{part}[k]" if rank else f"x {part}[k]"

    share = c.num_kv_heads // c.num_latents
    return [
        _rotated(c, rope),
        "q_n = rotated(x query[n])",
        f"k_k = rotated({project('key', c.key_rank)})",
        f"v_k = {project('value', c.value_rank)}",
        f"k(n) = n // {c.num_heads // c.num_kv_heads}, j(k) = k // {share}",
    ]


def _latent(c: MLAConfig, rope: bool) -> list[str]:
    normed = "z" if c.qk_norm == "none" else _norm(c)
    return [
        f"normed(z) = {normed}",
        _rotated(c, rope),
        f"latent = {_norm(c, '(x down)')}",
        "q_n = [normed(x query[n]), rotated(x rope_query[n])]",
        "k_n = [latent up_key[n], rotated(x rope_key)]",
        "v_n = latent up_value[n], k(n) = n",
    ]


def _rebuilt(c: PaperMLAConfig, rope: bool) -> list[str]:
    return [
        _rotated(c, rope),
        "latent = x down",
        "q_n = rotated(x query[n])",
        "k_n = rotated(latent up_key[n])",
        "v_n = latent up_value[n], k(n) = n",
    ]


KINDS = {
    GroupedConfig: _grouped,
    FactoredConfig: _factored,
    MLAConfig: _latent,
    PaperMLAConfig: _rebuilt,
}


def _rope(block: BlockConfig, channels: int) -> str:
    scaled = ""
    if block.rope_factor != 1:
        rotations = f"{block.rope_original} · {block.rope_base:g}^(-2i/{channels}) / 2π"
        span = f"{block.rope_high:g} - {block.rope_low:g}"
        scaled = (
            f", times s_i + (1 - s_i) / {block.rope_factor:g}, where s_i = clip(({rotations} - "
            f"{block.rope_low:g}) / ({span}), 0, 1) (Llama 3.1)"
        )
    half = channels // 2
    if block.rope_fraction != 1:
        pairs = rope.Partial(block.rope_base, block.rope_fraction).num_rotated_pairs(channels)
        scaled += f", i < {pairs}; other channels are not rotated"
        channels = 2 * pairs
    return (
        f"RoPE at position t rotates channels (i, i + {half}) from (a, b) to (a cos - b sin, b cos "
        f"+ a sin) by the angle t · {block.rope_base:g}^(-2i/{channels}){scaled}."
    )


def _cached(mechanism: MechanismConfig, rope: bool) -> dict[str, str]:
    """Returns the formula of each cache field."""
    if isinstance(mechanism, MLAConfig):
        return dict(latent="latent", rope_key="rotated(x rope_key)")
    if isinstance(mechanism, PaperMLAConfig):
        return dict(latent="latent")
    scale = dict(key_scale="1 / sqrt(mean(z²) + epsilon) of the whole key of head k")
    if isinstance(mechanism, FactoredConfig):
        key = "x key[j], not rotated" if mechanism.key_rank else "k_k"
        return scale | dict(key=key, value="x value" + "[j]" * bool(mechanism.value_rank))
    if mechanism.ties_values:
        return dict(base_key="x base_key[j], not rotated", residual_key="x latent_key[k]")
    if not mechanism.rank:
        return dict(base_key="k_k", base_value="v_k")
    gain = " · gain" if mechanism.qk_norm == "rms_gain" else ""
    base = f"x base_key[j]{gain}"
    return scale | dict(
        base_key=f"RoPE({base})" if rope else base,
        base_value="x base_value[j]",
        residual_key="x latent_key[k], not rotated",
        residual_value="x latent_value[k]",
    )


def _cache(config: TransformerConfig) -> list[str]:
    """Returns a table of the cache's fields per token, and the total over layers."""
    rows, total = [], 0
    for layers, (mechanism, length) in zip(_layers(config), config.layer_groups, strict=True):
        holds = _cached(mechanism, config.block.positions == "rope")
        for name, field in mechanism.entry().items():
            elements = math.prod(field.shape)
            kept = holds[name] + ", in float32" * field.wide
            rows.append((layers, name, kept, f"`{field.axes}`", elements))
            total += elements * length
    header = ("layers", "field", "is", "axes", "elements per token and layer")
    weights = [
        name
        for segment in parameters.abstract(config).axes["segments"].values()
        for name in segment["attention"]["mechanism"]
    ]
    absorbed = [f"`{name}`" for name in _richest(config).absorbed if name in weights]
    parts = ["\n".join(output.markdown(header, rows)), f"In all {total:,} elements per token."]
    if absorbed:
        parts.append(
            f"Decoding multiplies {' and '.join(absorbed)} into queries and outputs, or into one "
            "tile of the cache at a time: see `kvjax/kernels/decode_attention`."
        )
    return parts
