"""Reference model in NumPy float64, written from the papers' equations, head by head.

It shares only configs and names of weights with the product.
"""

import functools
import math

import jax
import numpy as np
import scipy.special

from kvjax.attention import (
    FactoredConfig,
    GLAConfig,
    GroupedConfig,
    GTAConfig,
    MFAKRConfig,
    MLAConfig,
    MLALRKVConfig,
    MLRAConfig,
    PaperMLAConfig,
    SharedKVConfig,
    TPAConfig,
)
from kvjax.layers.rope import Linear, Llama3, Partial, Yarn


def rotate(x_BTH, positions_T, base):
    """Rotates the channel pair (i, i + H/2) of position t by t / base^(2i/H)."""
    H = x_BTH.shape[-1]
    out = np.empty_like(x_BTH)
    for i in range(H // 2):
        angle = positions_T.astype(np.float64) * frequency(i, H, base)
        c, s = np.cos(angle)[None], np.sin(angle)[None]
        a, b = x_BTH[..., i], x_BTH[..., i + H // 2]
        out[..., i], out[..., i + H // 2] = a * c - b * s, b * c + a * s
    return out


def frequency(i, H, base):
    """Returns radians per token of pair i; Llama 3's scaling by wavelengths, as in its code."""
    if isinstance(base, Partial):
        rotated_pairs = max(1, round(base.fraction * H / 2))
        return frequency(i, 2 * rotated_pairs, base.base) if i < rotated_pairs else 0.0
    if not isinstance(base, (Llama3, Yarn, Linear)):
        return base ** (-2 * i / H)
    unscaled = base.base ** (-2 * i / H)
    if isinstance(base, Linear):
        return unscaled / base.factor
    if isinstance(base, Yarn):
        return _yarn(i, H, base, unscaled)
    wavelength = 2 * math.pi / unscaled
    if wavelength < base.original / base.high:
        return unscaled
    if wavelength > base.original / base.low:
        return unscaled / base.factor
    smooth = (base.original / wavelength - base.low) / (base.high - base.low)
    return (1 - smooth) * unscaled / base.factor + smooth * unscaled


def _yarn(i, H, base, unscaled):
    """YaRN's, as in its authors' code: a ramp between the pairs of two numbers of turns."""

    def pair(turns):
        return H * math.log(base.original / (turns * 2 * math.pi)) / (2 * math.log(base.base))

    low = max(math.floor(pair(base.high)), 0)
    high = min(math.ceil(pair(base.low)), H - 1)
    ramp = min(max((i - low) / (0.001 if high == low else high - low), 0), 1)
    return unscaled / base.factor * ramp + unscaled * (1 - ramp)


def rms(x, epsilon, gain=None):
    y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
    return y if gain is None else y * gain


def _projection(w, x_BTD, name, head):
    y = x_BTD @ w[name][:, head]
    return y + w[f"{name}_bias"][head] if f"{name}_bias" in w else y


def _query_input(c, w, x_BTD):
    """Returns the input or, with query_rank, its normed latent."""
    if not c.query_rank:
        return x_BTD
    gain = w["query_latent_norm"]["gain"] if c.qk_norm == "rms_gain" else None
    latent = rms(x_BTD @ w["query_down"], c.norm_epsilon, gain)
    return latent * (math.sqrt(x_BTD.shape[-1] / c.query_rank) if c.latent_scale else 1)


def _normed_latent(c, w, latent, index=...):
    """Normalises each latent by itself, for every `qk_norm`, unless `norm_latent` is False.

    Args:
      index: selects the latent's gains.
    """
    if not getattr(c, "norm_latent", True):
        return latent
    gain = w["latent_norm"]["gain"][index] if c.qk_norm == "rms_gain" else None
    D = w["down" if "down" in w else "latent"].shape[0]
    scale = math.sqrt(D / latent.shape[-1]) if c.latent_scale else 1
    return rms(latent, c.norm_epsilon, gain) * scale


def _grouped(c, w, x_BTD, norm, rotate):
    if c.qk_norm == "rms_whole":
        yield from _normed_as_one(c, w, x_BTD, rotate)
        return
    for n in range(c.num_heads):
        k_head = n * c.num_kv_heads // c.num_heads
        base = k_head * c.num_bases // c.num_kv_heads
        parts = {}
        for kind in ("key", "value") if c.tie in ("none", "qk") else ("key",):
            parts[kind] = [_projection(w, x_BTD, f"base_{kind}", base)]
            if c.rank:
                latent = _projection(w, x_BTD, f"latent_{kind}", k_head)
                parts[kind].append(latent @ w[f"expand_{kind}"][k_head])
        k = parts["key"]
        query_input = _query_input(c, w, x_BTD)
        q = sum(k) if c.tie in ("qk", "qkv") else _projection(w, query_input, "query", n)
        v = sum(parts.get("value", k))
        q = norm(q, "query_norm")
        if c.rope == "shared" and c.rank:  # [rotated, not] and [base, residual]
            rms_k, gain = 1.0, 1.0
            if c.qk_norm != "none":
                rms_k = np.sqrt(np.mean(sum(k) ** 2, -1, keepdims=True) + c.norm_epsilon)
            if c.qk_norm == "rms_gain":
                gain = w["key_norm"]["gain"]
            base_k, residual = (y / rms_k * gain for y in k)
            k = np.concatenate([rotate(base_k), residual], -1)
            yield np.concatenate([rotate(q), q], -1), k, v
        else:
            yield rotate(q), rotate(norm(sum(k), "key_norm")), v


def _normed_as_one(c, w, x_BTD, rotate):
    """OLMo 2: an RMSNorm of all heads' queries, and one of all heads' keys."""
    normed = {}
    for name, projection, heads in (
        ("query", "query", c.num_heads),
        ("key", "base_key", c.num_bases),
    ):
        parts = [_projection(w, x_BTD, projection, head) for head in range(heads)]
        gain = w[f"{name}_norm"]["gain"].reshape(-1)
        normed[name] = np.split(rms(np.concatenate(parts, -1), c.norm_epsilon, gain), heads, -1)
    for n in range(c.num_heads):
        j = n * c.num_bases // c.num_heads
        value = _projection(w, x_BTD, "base_value", j)
        yield rotate(normed["query"][n]), rotate(normed["key"][j]), value


def _factored(c, w, x_BTD, norm, rotate):
    for n in range(c.num_heads):
        k_head = n * c.num_kv_heads // c.num_heads
        parts = {}
        for kind, rank in (("key", c.key_rank), ("value", c.value_rank)):
            if rank:
                latent = _projection(w, x_BTD, kind, k_head * c.num_latents // c.num_kv_heads)
                parts[kind] = latent @ w[f"expand_{kind}"][k_head]
            else:
                parts[kind] = _projection(w, x_BTD, kind, k_head)
        q = norm(_projection(w, _query_input(c, w, x_BTD), "query", n), "query_norm")
        yield rotate(q), rotate(norm(parts["key"], "key_norm")), parts["value"]


def _latent_queries(c, w, x_BTD, norm, rotate):
    query_input = _query_input(c, w, x_BTD)
    for n in range(c.num_heads):
        content = norm(_projection(w, query_input, "query", n), "query_norm")
        position = rotate(norm(_projection(w, query_input, "rope_query", n), "rope_query_norm"))
        yield np.concatenate([content, position], -1)


def _rope_key(w, x_BTD, norm, rotate):
    return rotate(norm(x_BTD @ w["rope_key"] + w.get("rope_key_bias", 0.0), "rope_key_norm"))


def _latent(c, w, x_BTD, norm, rotate):
    latent = _normed_latent(c, w, x_BTD @ w["down"])
    shared = _rope_key(w, x_BTD, norm, rotate)
    for n, q in enumerate(_latent_queries(c, w, x_BTD, norm, rotate)):
        k = np.concatenate([latent @ w["up_key"][:, n], shared], -1)
        yield q, k, latent @ w["up_value"][:, n]


def _residual_latent(c, w, x_BTD, norm, rotate):
    for n, (q, k, v) in enumerate(_latent(c, w, x_BTD, norm, rotate)):
        if c.rank:

            def residual(kind, n=n):
                return x_BTD @ w[f"latent_{kind}"][:, n] @ w[f"expand_{kind}"][n]

            k = np.concatenate([k[..., : c.key_dim] + residual("key"), k[..., c.key_dim :]], -1)
            v = v + residual("value")
        yield q, k, v


def _grouped_latent(c, w, x_BTD, norm, rotate):
    shared = _rope_key(w, x_BTD, norm, rotate)
    group = c.num_heads // c.num_latents  # query heads per latent
    for branch in range(getattr(c, "num_branches", 1)):
        for n, q in enumerate(_latent_queries(c, w, x_BTD, norm, rotate)):
            index = (n // group,) if type(c) is GLAConfig else (branch, n // group)
            latent = _normed_latent(c, w, x_BTD @ w["down"][:, *index], index)
            k = np.concatenate([latent @ w["up_key"][index][:, n % group], shared], -1)
            yield q, k, latent @ w["up_value"][index][:, n % group]


def _tied_latent(c, w, x_BTD, norm, rotate):
    H, P = c.key_dim, c.rope_key_dim
    query_input = _query_input(c, w, x_BTD)
    for n in range(c.num_heads):
        v = x_BTD @ w["latent"][:, n * c.num_kv_heads // c.num_heads]
        q = query_input @ w["query"][:, n]
        q, q_rope = norm(q[..., : H - P], "query_norm"), q[..., H - P :]
        k = v[..., : H - P]
        if P:
            q = np.concatenate([q, rotate(norm(q_rope, "rope_query_norm"))], -1)
            r = rotate(norm(x_BTD @ w["rope_key"], "rope_key_norm"))
            k = np.concatenate([k, r], -1)
        yield q, k, v


def _shared_kv(c, w, x_BTD, norm, rotate):
    def rotated(x):
        return _rotate_last(x, c.rope_key_dim, rotate)

    query_input = _query_input(c, w, x_BTD)
    for n in range(c.num_heads):
        k_head = n * c.num_kv_heads // c.num_heads
        k = rotated(_normed_latent(c, w, x_BTD @ w["latent"][:, k_head], k_head))
        yield rotated(norm(query_input @ w["query"][:, n], "query_norm")), k, k


def _rotate_last(x, P, rotate):
    return np.concatenate([x[..., : x.shape[-1] - P], rotate(x[..., x.shape[-1] - P :])], -1)


def _reused_keys(c, w, x_BTD, norm, rotate):
    query_input = _query_input(c, w, x_BTD)
    for n in range(c.num_heads):
        k = x_BTD @ w["base_key"][:, n * c.num_kv_heads // c.num_heads]
        q = norm(query_input @ w["query"][:, n], "query_norm")
        yield rotate(q), rotate(norm(k, "key_norm")), k


def _tensor_product(c, w, x_BTD, norm, rotate):
    def factors(name):
        heads, channels = w[f"{name}_head"], w[f"{name}_factor"]
        R = heads.shape[-1]
        return [
            sum(
                (x_BTD @ heads[:, n, r])[..., None] * (x_BTD @ channels[:, r]) / R for r in range(R)
            )
            for n in range(c.num_heads)
        ]

    keys, values = factors("key"), factors("value")
    queries = factors("query") if c.query_factors else None
    for n in range(c.num_heads):
        q = queries[n] if queries else _query_input(c, w, x_BTD) @ w["query"][:, n]
        yield rotate(norm(q, "query_norm")), rotate(norm(keys[n], "key_norm")), values[n]


def _rebuilt_latent(c, w, x_BTD, norm, rotate):
    latent = x_BTD @ w["down"]
    for n in range(c.num_heads):
        q = norm(_query_input(c, w, x_BTD) @ w["query"][:, n], "query_norm")
        k = norm(latent @ w["up_key"][:, n], "key_norm")
        yield rotate(q), rotate(k), latent @ w["up_value"][:, n]


def _combined(c, w, outputs, rotate_back):
    """Combines the outputs of softmax attention, a list over query heads of [B, T, Hv]."""
    if type(c) is MLRAConfig:
        N, G = c.num_heads, c.num_branches
        return [sum(outputs[g * N + n] for g in range(G)) / math.sqrt(G) for n in range(N)]
    if type(c) is SharedKVConfig:
        return [_rotate_last(o, c.rope_key_dim, rotate_back) for o in outputs]
    if type(c) is MFAKRConfig:
        return [o + w["value_gate"] * (o @ w["value_map"]) for o in outputs]
    return outputs


# By config: a generator of each query head's query, key and value [B, T, H].
HEADS = {
    GroupedConfig: _grouped,
    FactoredConfig: _factored,
    MLAConfig: _latent,
    MLALRKVConfig: _residual_latent,
    PaperMLAConfig: _rebuilt_latent,
    GLAConfig: _grouped_latent,
    MLRAConfig: _grouped_latent,
    GTAConfig: _tied_latent,
    SharedKVConfig: _shared_kv,
    MFAKRConfig: _reused_keys,
    TPAConfig: _tensor_product,
}


def queries_keys_values(config, w, x_BTD, positions_T, base):
    """Returns lists of each query head's queries, keys and values [B, T, H], normed and rotated.

    Args:
      w: the mechanism's weights; NumPy float64, as x_BTD.
      base: RoPE's base; None: no RoPE.
    """

    def norm(y, name):
        if config.qk_norm in ("none", "rms_whole"):
            return y
        gain = w[name]["gain"] if config.qk_norm in ("rms_gain", "rms_offset") else None
        gain = 1 + gain if config.qk_norm == "rms_offset" else gain
        return rms(y, config.norm_epsilon, gain)

    def rotated(y):
        return y if base is None else rotate(y, positions_T, base)

    heads = HEADS[type(config)](config, w, x_BTD, norm, rotated)
    return [list(column) for column in zip(*heads, strict=True)]


def encoding(positions_T, channels):
    """Returns [T, C]: sines in even, cosines in odd channels (Vaswani et al., section 3.5)."""
    out = np.empty((len(positions_T), channels))
    for i in range(channels):
        angle = positions_T / 10_000 ** (2 * (i // 2) / channels)
        out[:, i] = np.cos(angle) if i % 2 else np.sin(angle)
    return out


def attention_maps(config, w, x_BTD, positions_T, base):
    """Yields the logits of each query head, [B, T, S].

    The "+" of projection sharing (section 2.2): P [T, S, m] is a fixed 2-D encoding; the map is
    broadcast over m channels, added to P, and mapped back by a 1x1 convolution, w/m.
    """
    m = getattr(config, "position_channels", 0)
    slopes = iter(alibi_slopes(config.num_heads))
    for q, k, _ in zip(*queries_keys_values(config, w, x_BTD, positions_T, base), strict=True):
        copies = 2 if getattr(config, "splits_rope", False) else 1  # rotated and unrotated
        scale = getattr(config, "logit_scale", 0) or 1 / math.sqrt(q.shape[-1] / copies)
        z_BTS = np.einsum("bth,bsh->bts", q, k) * scale
        if getattr(config, "alibi", False):
            z_BTS = z_BTS - next(slopes) * (positions_T[:, None] - positions_T[None])
        if m:
            e = encoding(positions_T, m // 2)
            T = len(positions_T)
            p_TSm = np.zeros((T, T, m))
            for t in range(T):
                for s in range(T):
                    p_TSm[t, s] = np.concatenate([e[t], e[s]])
            z_BTS = (z_BTS[..., None] + p_TSm[None]) @ (w["position_map"] / m)
        yield z_BTS


def alibi_slopes(N):
    """ALiBi's geometric sequence, section 3 and footnote: ratio and start 2^(-8/N)."""
    if N & (N - 1) == 0:
        return [2 ** (-8 / N * (i + 1)) for i in range(N)]
    below = 2 ** math.floor(math.log2(N))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: N - below]


def softmax(z, axis=-1):
    e = np.exp(z - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def attention(
    config,
    weights,
    x_BTD,
    *,
    base,
    causal,
    window=0,
    factor=1.0,
    softcap=0.0,
    positions_T=None,
):
    """Returns softmax attention [B, T, D] from an attention module's weights, head by head.

    Args:
      factor: of logits, before the soft cap.
    """
    T = x_BTD.shape[1]
    positions_T = np.arange(T) if positions_T is None else positions_T
    outputs = []
    arguments = (config, weights["mechanism"], x_BTD, positions_T, base)
    values = queries_keys_values(*arguments)[2]
    for z, v in zip(attention_maps(*arguments), values, strict=True):
        z = factor * z
        z = softcap * np.tanh(z / softcap) if softcap else z
        if causal:
            distance = np.arange(T)[:, None] - np.arange(T)
            z = np.where((distance >= 0) & (distance < (window or T)), z, -np.inf)
        outputs.append(softmax(z) @ v)

    def rotate_back(x):
        return x if base is None else rotate(x, -positions_T, base)

    outputs = _combined(config, weights["mechanism"], outputs, rotate_back)
    y = np.zeros((*x_BTD.shape[:2], weights["out"].shape[-1]))
    for n, o in enumerate(outputs):
        if config.output_gate:
            o = o / (1 + np.exp(-(x_BTD @ weights["gate"][:, n])))
        y += o @ weights["out"][n]
    return y + weights.get("out_bias", 0.0)


def _norm(block, w, x):
    """LayerNorm or RMSNorm, with gain and bias if there are any."""
    if block.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = rms(x, block.norm_epsilon)
    gain = 1 + w["gain"] if block.norm_offset and "gain" in w else w.get("gain", 1.0)
    return x * gain + w.get("bias", 0.0)


def _layer(block, layer):
    """Returns RoPE's base, the window and the factor of logits of a layer."""
    window = block.window if not block.window_layers or block.window_layers[layer] else 0
    if not (block.rope_layers or [1] * block.num_layers)[layer]:
        return dict(base=None, window=window)
    if window and block.window_rope_base:
        return dict(base=block.window_rope_base, window=window)
    return dict(base=block.angles_base, window=window, factor=block.rope_attention_factor**2)


def _gelu(x):
    """GPT-2's, with tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _same(_, x):
    return x


def activations(config, weights, tokens_BT):
    """Returns a Transformer's final activations [B, T, D], computed layer by layer."""
    c = config.block
    x = c.embedding_scale * weights["embedding"][tokens_BT]
    if c.positions == "learned":
        x = x + weights["positions"][: tokens_BT.shape[1]]
    if c.positions == "sinusoidal":
        t, i = np.mgrid[: tokens_BT.shape[1], : c.d_model]
        angle = t * 10_000.0 ** (-(i - i % 2) / c.d_model)
        x = x + np.where(i % 2, np.cos(angle), np.sin(angle))
    if c.embedding_norm:
        x = _norm(c, weights.get("embedding_norm", {}), x)
    layers = []
    for (mechanism, length), stack in zip(
        config.layer_groups, weights["segments"].values(), strict=True
    ):
        layers += [(mechanism, jax.tree.map(lambda a, i=i: a[i], stack)) for i in range(length)]
    assert len(layers) == c.num_layers
    for layer, (mechanism, w) in enumerate(layers):
        norm = functools.partial(lambda w, part, x: _norm(c, w.get(part, {}), x), w)
        pre_norm, post_norm = (_same, norm) if c.norm_after else (norm, _same)
        output_norm = _same
        if c.norm_outputs:
            pre_norm, output_norm = _same, norm
        h = pre_norm("attention_norm", x)
        options = dict(causal=c.causal, softcap=c.attention_softcap)
        y = attention(mechanism, w["attention"], h, **options, **_layer(c, layer))
        y = norm("attention_out_norm", y) if c.norm_both else output_norm("attention_norm", y)
        x = post_norm("attention_norm", x + c.residual_scale * y)
        h, m = pre_norm("mlp_norm", x), w["mlp"]
        up = h @ m["up"] + m.get("up_bias", 0.0)
        if c.activation == "relu2":
            up = np.maximum(up, 0) ** 2
        elif c.activation == "relu":
            up = np.maximum(up, 0)
        elif c.activation == "gelu":
            up = _gelu(up)
        elif c.activation == "gelu_exact":
            up = up * (1 + scipy.special.erf(up / math.sqrt(2))) / 2
        else:
            gate = h @ m["gate"]
            up = (_gelu(gate) if c.activation == "geglu" else gate / (1 + np.exp(-gate))) * up
        y = up @ m["down"] + m.get("down_bias", 0.0)
        y = norm("mlp_out_norm", y) if c.norm_both else output_norm("mlp_norm", y)
        x = post_norm("mlp_norm", x + c.residual_scale * y)
    x = x if c.norm_after else _norm(c, weights.get("final_norm", {}), x)
    return x / c.logit_divisor


def logits(config, weights, tokens_BT):
    """Returns a Transformer's logits [B, T, V]."""
    head = weights["embedding"].T if config.block.tied_head else weights["head"]
    z = activations(config, weights, tokens_BT) @ head
    cap = config.block.logit_softcap
    return cap * np.tanh(z / cap) if cap else z


def nats(logits_BTV, targets_BT):
    """Returns the cross-entropy of the targets, [B, T]."""
    top = logits_BTV.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits_BTV - top).sum(-1)) + top[..., 0]
    return normaliser - np.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
