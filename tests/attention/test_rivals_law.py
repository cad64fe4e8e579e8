"""The law for other authors' mechanisms, every pair of their options that can meet."""

import functools
import itertools

import pytest

from kvjax.attention import MECHANISMS, GroupedConfig
from kvjax.foundation.errors import UserError
from tests import quick
from tests.attention import law

COMMON = dict(
    positions=("none", "full"),
    qk_norm=("none", "rms", "rms_gain"),
    query_rank=(0, 5),
    latent_scale=(False, True),
    output_gate=(False, True),
    bias=(False, True),
)
OF_LATENTS = dict(num_latents=(1, 2, 4), dims=((8, 8), (8, 6)))
FACTORS = dict(
    mla=COMMON | dict(dims=((8, 8), (8, 6))),
    mla_lrkv=COMMON | dict(dims=((8, 8), (8, 6)), rank=(0, 3)),
    gla=COMMON | OF_LATENTS,
    mlra=COMMON | OF_LATENTS | dict(num_branches=(1, 2, 4)),
    gta=COMMON | dict(num_kv_heads=(1, 2, 4), rope_key_dim=(0, 2, 4)),
    shared_kv=COMMON | dict(num_kv_heads=(1, 2, 4), rope_key_dim=(0, 4, 8)),
    mfa_kr=COMMON | dict(num_kv_heads=(1, 2, 4)),
    tpa=COMMON
    | dict(
        dims=((8, 8), (8, 6)),
        query_factors=(0, 3),
        ranks=((2, 2), (1, 1), (3, 2)),
    ),
    mfa=COMMON | dict(tie=("none", "kv"), rank=(0, 3)),
)
FIXED = dict(
    mla=dict(latent_dim=10, rope_key_dim=4),
    mla_lrkv=dict(latent_dim=6, rope_key_dim=4),
    gla=dict(latent_dim=6, rope_key_dim=4),
    mlra=dict(latent_dim=6, rope_key_dim=4),
    mfa=dict(num_kv_heads=4, num_bases=1),
)


def _make(kind, keys):
    """The config, and its RoPE base; None if there is no such."""
    keys = dict(keys) | FIXED.get(kind, {}) | dict(num_heads=4, norm_epsilon=1e-2)
    base = law.BASE if keys.pop("positions") == "full" else None
    if "dims" in keys:
        keys["key_dim"], keys["value_dim"] = keys.pop("dims")
    else:
        keys["key_dim"] = 8
    if "ranks" in keys:
        keys["key_rank"], keys["value_rank"] = keys.pop("ranks")
    cls = MECHANISMS[kind] if kind in MECHANISMS else GroupedConfig
    if cls is GroupedConfig:
        keys["value_dim"] = 8
    try:
        return cls(**keys), base
    except UserError:
        return None


@functools.cache
def _cases():
    return [
        (kind, row)
        for kind, factors in FACTORS.items()
        for row in law.covering(factors, functools.partial(_make, kind))
    ]


def test_every_pair_of_options_that_can_meet_does():
    """Pairs that a config refuses are listed here; a config that refused more would fail."""
    refused = {}
    for kind, factors in FACTORS.items():
        rows = [row for name, row in _cases() if name == kind]
        met = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
        names = list(factors)
        for (i, values), (j, others) in itertools.combinations(enumerate(factors.values()), 2):
            for a, b in itertools.product(values, others):
                if ((i, a), (j, b)) not in met:
                    refused.setdefault(kind, set()).add((names[i], a, names[j], b))
    scaled = ("query_rank", 0, "latent_scale", True)  # no latent at all
    of_tpa = {
        ("query_rank", 5, "query_factors", 3),
        ("latent_scale", True, "query_factors", 3),
    }
    assert refused == {
        **{kind: {scaled} for kind in ("gta", "mfa", "mfa_kr")},
        "tpa": {scaled, *of_tpa},
    }


@pytest.mark.parametrize(
    "kind, row",
    quick.every(len(_cases()), _cases(), first=79),
    ids=lambda v: v if isinstance(v, str) else law.row_id(v),
)
def test_the_law_for_pairs_of_options(x64, randomise, kind, row):
    law.check(randomise, *_make(kind, dict(zip(FACTORS[kind], row, strict=True))))
