"""Attention sections of configs.

`mechanism` makes the section of any mechanism. The functions below it make the sections of the
configs in `attention.named`.
"""

from collections.abc import Callable
from dataclasses import asdict, fields
import functools

from kvjax.attention import MECHANISMS, kind_of, named
from kvjax.attention.mechanism import MechanismConfig
from kvjax.attention.named import HEAD_DIM

_RANKS_BY_LAYER = ("grouped", "factored")  # kinds whose sections have the key `layer_ranks`


def section(config: MechanismConfig) -> dict:
    """Returns the attention section of a mechanism's config."""
    kind = kind_of(config)
    ranks = dict(layer_ranks=()) if kind in _RANKS_BY_LAYER else {}
    return dict(kind=kind) | ranks | asdict(config)


def mechanism(kind: str, num_heads: int, *, head_dim: int = HEAD_DIM, **keys) -> dict:
    """Returns the attention section of a mechanism, by its name in `attention.MECHANISMS`.

    Args:
      head_dim: channels of keys and values.
      keys: other keys of the mechanism's config.
    """
    cls = MECHANISMS[kind]
    dims = {"key_dim", "value_dim"} & {field.name for field in fields(cls)}
    return section(cls(num_heads=num_heads, **dict.fromkeys(dims, head_dim) | keys))


def without_qk_norm(attention: dict, *, bias: bool = False) -> dict:
    """Returns the section without QK-norm, as in most published models, and with `bias`."""
    return attention | dict(qk_norm="none", bias=bias)


def _as_section(make: Callable[..., MechanismConfig]) -> Callable[..., dict]:
    """Returns a function that calls `make` and returns its config as an attention section."""

    @functools.wraps(make)
    def make_section(*args, **keys):
        return section(make(*args, **keys))

    return make_section


factored = _as_section(named.factored)
gla = _as_section(named.gla)
gqa = _as_section(named.gqa)
grouped = _as_section(named.grouped)
gta = _as_section(named.gta)
lrkv = _as_section(named.lrkv)
mfa = _as_section(named.mfa)
mfa_kr = _as_section(named.mfa_kr)
mha = _as_section(named.mha)
mla = _as_section(named.mla)
mla_lrkv = _as_section(named.mla_lrkv)
mla_paper = _as_section(named.mla_paper)
mlra = _as_section(named.mlra)
mqa = _as_section(named.mqa)
projection_sharing = _as_section(named.projection_sharing)
shared_kv = _as_section(named.shared_kv)
thin_keys = _as_section(named.thin_keys)
tpa = _as_section(named.tpa)
