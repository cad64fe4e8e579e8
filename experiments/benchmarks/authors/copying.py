"""Converts weights of the authors' attention modules to the form of kvjax's mechanisms.

A matrix of PyTorch's `Linear` is [out, in]; kvjax's is [in, heads, channels]. If a matrix reads the
output of a norm, the norm's gain is multiplied into the matrix. kvjax's RoPE rotates channel pairs
(i, i + H/2) by +t. If the authors' RoPE has other pairs or rotates by -t, an `order` permutes a
head's channels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvjax.attention import GroupedConfig, GTAConfig, MLAConfig, SharedKVConfig, TPAConfig

Weights = Mapping[str, np.ndarray]  # arrays by the authors' names
Order = Callable[[int], np.ndarray]  # number of channels -> their permutation


def unchanged(channels: int) -> np.ndarray:
    """Returns the order for kvjax's own RoPE: the identity."""
    return np.arange(channels)


def backwards(channels: int) -> np.ndarray:
    """Returns the order for pairs (i, i + H/2) rotated by -t: the halves change places."""
    return np.roll(np.arange(channels), channels // 2)


def interleaved(channels: int) -> np.ndarray:
    """Returns the order for pairs (2i, 2i + 1)."""
    return np.arange(channels).reshape(-1, 2).T.ravel()


def partial_backwards(channels: int, rotated: int) -> np.ndarray:
    """Returns the order for RoPE of the first `rotated` channels alone, as in `backwards`."""
    first, second = np.split(np.arange(rotated), 2)
    unrotated = np.split(np.arange(rotated, channels), 2)
    return np.concatenate([second, unrotated[0], first, unrotated[1]])


def _heads(weights: Weights, name: str, heads: int) -> np.ndarray:
    """Returns a weight as [in, heads, channels], or a bias as [heads, channels]."""
    matrix = weights[name].T
    return matrix.reshape(*matrix.shape[:-1], heads, -1)


def _output(weights: Weights, name: str, heads: int) -> dict[str, np.ndarray]:
    """Returns the output weight [heads, channels, D], and the bias if there is one."""
    matrix = weights[f"{name}.weight"].T
    converted = {"out": matrix.reshape(heads, -1, matrix.shape[-1])}
    if f"{name}.bias" in weights:
        converted["out_bias"] = weights[f"{name}.bias"]
    return converted


def grouped(
    weights: Weights,
    config: GroupedConfig,
    *,
    names: str = "c_q c_k c_v c_proj",
    order: Order = unchanged,
    gate: str = "",
) -> dict[str, np.ndarray]:
    """Converts the weights of MHA, GQA, MQA, MFA and projection sharing.

    Args:
      names: names of the weights of queries, keys, values and output; "-" for a projection that is
        tied to another one and has no weight.
    """
    query, key, value, output = names.split()
    converted = _output(weights, output, config.num_heads)
    permutation = order(config.key_dim)
    for our_name, name, heads in (
        ("query", query, config.num_heads),
        ("base_key", key, config.num_bases),
        ("base_value", value, config.num_bases),
    ):
        if name != "-":
            channels = slice(None) if our_name == "base_value" else permutation
            for suffix, kind in (("", "weight"), ("_bias", "bias")):
                if f"{name}.{kind}" in weights:
                    by_head = _heads(weights, f"{name}.{kind}", heads)
                    converted[our_name + suffix] = by_head[..., channels]
    if gate:
        converted["gate"] = _heads(weights, f"{gate}.weight", config.num_heads)
    return converted


def mfa(weights: Weights, config: GroupedConfig) -> dict[str, np.ndarray]:
    """Converts the weights of MLRA's MFA, whose queries are projected from a normalised latent."""
    up = weights["w_q.weight"] * weights["q_layernorm.weight"]
    converted = grouped(dict(weights) | {"w_q.weight": up}, config, names="w_q c_k c_v c_proj")
    return converted | {"query_down": weights["c_q.weight"].T}


def split_fused(weights: Weights, name: str, parts: str) -> dict[str, np.ndarray]:
    """Splits a matrix (and its bias) that several projections of equal size share.

    Args:
      parts: names of the projections, in order.
    """
    split = dict(weights)
    for kind in ("weight", "bias"):
        if f"{name}.{kind}" in weights:
            pieces = np.split(split.pop(f"{name}.{kind}"), len(parts.split()))
            split |= {f"{part}.{kind}": x for part, x in zip(parts.split(), pieces, strict=True)}
    return split


def latent(
    weights: Weights,
    config: MLAConfig,
    *,
    ups: Sequence[tuple[str, np.ndarray]],
    order: Order = unchanged,
    output: str = "c_proj",
    gate: str = "",
    scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """Converts the weights of MLA, GLA and MLRA, with DeepSeek's names.

    Args:
      ups: for each latent the name of its norm's gain, and its up-projection [C, n (H + Hv)].
      scale: factor from kvjax's outputs to the authors', multiplied into the output weight.
    """
    N, H, P = config.num_heads, config.key_dim, config.rope_key_dim
    permutation = order(P)
    converted = {}
    if config.query_rank:
        converted["query_down"] = weights["q_a_proj.weight"].T
        query = weights["q_b_proj.weight"] * weights["q_a_layernorm.weight"]
    else:
        query = weights["q_proj.weight"]
    query = query.T.reshape(-1, N, H + P)
    converted |= {"query": query[..., :H], "rope_query": query[..., H:][..., permutation]}
    down, rope_key = np.split(weights["kv_a_proj_with_mqa.weight"].T, [-P], axis=1)
    latents = config.entry()["latent"].shape
    converted |= {"down": down.reshape(-1, *latents), "rope_key": rope_key[:, permutation]}
    up = np.stack([weights[gain][:, None] * matrix for gain, matrix in ups])
    up = up.reshape(*latents, -1, H + config.value_dim)
    converted |= {"up_key": up[..., :H], "up_value": up[..., H:]}
    out = _output(weights, output, N)["out"]
    if gate:
        converted["gate"] = _heads(weights, f"{gate}.weight", N)
    return converted | {"out": out * scale}


def gta(weights: Weights, config: GTAConfig, *, names: str = "c_q c_proj") -> dict[str, np.ndarray]:
    """Converts the weights of GTA.

    Args:
      names: names of the weights of queries and output.
    """
    query, output = names.split()
    converted = _output(weights, output, config.num_heads)
    converted["query"] = _heads(weights, f"{query}.weight", config.num_heads)
    converted["latent"] = _heads(weights, "kv_proj.weight", config.num_kv_heads)
    return converted | {"rope_key": weights["W_rope_k.weight"].T}


def tpa(
    weights: Weights,
    config: TPAConfig,
    *,
    order: Order = backwards,
    prefix: str = "c_qkv.",
    output: str = "c_proj",
) -> dict[str, np.ndarray]:
    """Converts the weights of TPA."""
    N, permutation = config.num_heads, order(config.key_dim)
    converted = _output(weights, output, N)

    def weight(name: str, heads: int) -> np.ndarray:
        return _heads(weights, f"{prefix}{name}.weight", heads)

    if config.query_factors:
        converted["query_head"] = weight("W_A_q", N)
        converted["query_factor"] = weight("W_B_q", config.query_factors)[..., permutation]
    else:
        converted["query"] = weight("c_q", N)[..., permutation]
    converted |= {"key_head": weight("W_A_k", N), "value_head": weight("W_A_v", N)}
    converted["key_factor"] = weight("W_B_k", config.key_rank)[..., permutation]
    return converted | {"value_factor": weight("W_B_v", config.value_rank)}


def deepseek_v4(weights: Weights, config: SharedKVConfig, *, groups: int) -> dict[str, np.ndarray]:
    """Converts DeepSeek-V4's attention without compression; its two output matrices become one."""
    N, H, P = config.num_heads, config.key_dim, config.rope_key_dim
    permutation = np.concatenate([np.arange(H - P), H - P + interleaved(P)])
    down = weights["o_a_proj.weight"]  # [groups * R, N * H / groups]
    up = np.split(weights["o_b_proj.weight"], groups, axis=1)
    products = [a.T @ b.T for a, b in zip(np.split(down, groups), up, strict=True)]
    converted = {
        "query_down": weights["q_a_proj.weight"].T,
        "query_latent_norm.gain": weights["q_a_norm.weight"],
        "query": _heads(weights, "q_b_proj.weight", N)[..., permutation],
        "query_norm.gain": np.ones(H),
        "latent": weights["kv_proj.weight"].T[:, None, permutation],
        "latent_norm.gain": weights["kv_norm.weight"][None, permutation],
    }
    return converted | {"out": np.concatenate(products).reshape(N, H, -1)[:, permutation]}
