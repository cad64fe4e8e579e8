"""What reports say alike: the names of mechanisms, of layers, and a curve in words."""

from collections.abc import Sequence

import numpy as np

from kvjax.attention import BranchedLatentConfig
from kvjax.attention import FactoredConfig
from kvjax.attention import GroupedConfig
from kvjax.attention import GroupedLatentConfig
from kvjax.attention import LatentConfig
from kvjax.attention import RebuiltLatentConfig
from kvjax.attention import ResidualLatentConfig
from kvjax.attention import ReusedKeysConfig
from kvjax.attention import SharedKVConfig
from kvjax.attention import TensorProductConfig
from kvjax.attention import TiedLatentConfig
from kvjax.attention.mechanism import MechanismConfig


def mechanism_names(configs: Sequence[MechanismConfig]) -> str:
    """The mechanisms of a model's layers in the papers' words."""
    return "; ".join(dict.fromkeys(map(mechanism_name, configs)))


def mechanism_name(config: MechanismConfig) -> str:
    """A mechanism in the papers' words, with the size that tells it from others of its kind."""
    if isinstance(config, FactoredConfig):
        return f"low rank, keys {config.key_rank}, values {config.value_rank}"
    if not isinstance(config, GroupedConfig):
        return _OTHERS[type(config)](config)
    tied = {"none": "", "kv": "Q-K=V, ", "qk": "Q=K-V, ", "qkv": "Q=K=V, "}[config.tie]
    bases = config.num_bases
    if config.rank:
        over = f" over {bases} bases" if bases > 1 else ""
        return f"{tied}LRKV{over}, rank {config.rank}"
    if bases == config.num_heads:
        return f"{tied}MHA"
    if bases == 1 and config.query_rank:
        return f"{tied}MFA, queries of rank {config.query_rank}"
    return f"{tied}MQA" if bases == 1 else f"{tied}GQA, {bases} KV heads"


_OTHERS = {
    LatentConfig: lambda c: f"MLA, latent {c.latent_dim}",
    ResidualLatentConfig: lambda c: f"LRKV over a latent of {c.latent_dim}, rank {c.rank}",
    RebuiltLatentConfig: lambda c: f"MLA without a RoPE key, latent {c.latent_dim}",
    GroupedLatentConfig: lambda c: f"GLA-{c.num_latents}, latents {c.latent_dim}",
    BranchedLatentConfig: lambda c: f"MLRA-{c.num_branches}, latents {c.latent_dim}",
    TiedLatentConfig: lambda c: f"GTA, {c.num_kv_heads} KV heads",
    SharedKVConfig: lambda c: f"shared KV, {c.num_kv_heads} KV heads",
    ReusedKeysConfig: lambda c: f"MFA-KR, {c.num_kv_heads} KV heads",
    TensorProductConfig: lambda c: f"TPA, ranks {c.key_rank} and {c.value_rank}",
}


def stages(num_layers: int) -> dict[str, int]:
    """The first, the middle and the last layer by name, as the paper's early, middle and late."""
    named = {"early": 0, "middle": num_layers // 2, "late": num_layers - 1}
    kept = {index: name for name, index in reversed(named.items())}
    return {f"{kept[index]}, layer {index}": index for index in sorted(kept)}


def in_words(values: Sequence[float | None], *, of: str = "layer", digits: str = ".1f") -> str:
    """The mean and the ends of a curve, with where they are."""
    there = [(value, i) for i, value in enumerate(values) if value is not None]
    if not there:
        return "no number"
    (low, first), (high, last) = min(there), max(there)
    mean = np.mean([value for value, _ in there])
    return (
        f"mean {mean:{digits}}, lowest {low:{digits}} ({of} {first}), "
        f"highest {high:{digits}} ({of} {last})"
    )
