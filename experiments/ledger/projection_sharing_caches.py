"""Claims of projection sharing (arXiv 2606.04032) on caches, and what follows for serving."""

import math

import jax.numpy as jnp

from experiments.ledger.out_of_reach import experiment_of
from experiments.ledger.verdicts import Cases, Claim, Computed, OfItself, Tabulated
from kvjax.costs import formulas

_TABLES = "python -m experiments.tables.paper_tables --save"
_TABLE_7 = "Projection sharing Table 7: cache at 300M, 16 bits"


def _cached(name: str, size: str) -> int:
    """Bytes a token in 16 bits, from shapes."""
    model = experiment_of(f"papers/{name}_{size}").model
    return formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16))


def _smaller(name: str, size: str = "1p2b") -> float:
    """How many times smaller a cache is than QKV's, from shapes."""
    return _cached("qkv", size) / _cached(name, size)


def _users(gigabytes: float) -> int:
    """Whose caches, of so many GB each, lie in 40 GB."""
    return int(40 / gigabytes)


def _gpus(gigabytes: float) -> int:
    """That hold 100 users."""
    return math.ceil(100 / _users(gigabytes))


# GB a user at 32K, as Table 7 prints them.
_QKV, _KV_TIED = 2.62, 1.31


def _rent() -> dict[str, bool]:
    """Whether section 3.3.3's thousands of dollars a month fit each other and its GPUs."""
    one = 14 / _gpus(_QKV)
    saved = 14 - 8
    return {
        "8k for 4": one * _gpus(_KV_TIED) == 8,
        "6k a month": saved == 6,
        "72k a year": 12 * saved == 72,
        "43 %": round(100 * saved / 14) == 43,
        "40 to 50 %": 40 <= 100 * saved / 14 <= 50,
    }


def _grouped() -> dict[str, tuple[float, float]]:
    """% saved by 1 - 1/(2g), and by shapes."""
    found = {}
    for called, name, size in (
        ("Q-GQA-4 at 300M", "kv_tied_gqa", "300m"),
        ("Q-GQA-8 at 1.2B", "kv_tied_gqa", "1p2b"),
    ):
        groups = experiment_of(f"papers/{name}_{size}").model.mechanisms[0].num_kv_heads
        found[called] = 100 * (1 - 1 / (2 * groups)), 100 * (1 - 1 / _smaller(name, size))
    return found


def _batch() -> dict[str, tuple[float, float]]:
    """GB of 32 users at 32K = 32,768 tokens at 1.2B: as printed, and by shapes."""
    printed = {"qkv": ("QKV", 189), "mqa": ("MQA", 5.6), "kv_tied_mqa": ("Q-MQA", 2.8)}
    return {
        called: (figure, 32 * 32_768 * _cached(name, "1p2b") / 1e9)
        for name, (called, figure) in printed.items()
    }


CLAIMS = (
    Claim(
        "Table 7",
        "cache at 300M; Q-K=V saves half",
        "80 and 40 KB per token",
        Tabulated((_TABLE_7,), only=lambda name: "section 2.3" not in name),
        _TABLES,
    ),
    *(
        Claim(
            "section 3.3.3",
            f"100 users at 32K on A100s of 40 GB, {name}: {users} users a GPU, {gpus} GPUs",
            f"{users}; {gpus}",
            OfItself(
                Cases(
                    lambda each=each, users=users, gpus=gpus: {
                        "users": _users(each) == users,
                        "GPUs": _gpus(each) == gpus,
                    },
                    lambda each=each: (
                        f"{_users(each)} users, {_gpus(each)} GPUs: 40 GB / {each} GB of Table 7, "
                        "weights left out"
                    ),
                )
            ),
            "",
        )
        for name, each, users, gpus in (("QKV", _QKV, 15, 7), ("Q-K=V", _KV_TIED, 30, 4))
    ),
    Claim(
        "section 3.3.3; section 2.4",
        "those GPUs cost $14k and $8k a month: $72k a year less, 43 %; 40 to 50 % of costs",
        "$14k, $8k, $6k, $72k; 43 %; 40-50 %",
        OfItself(Cases(_rent, lambda: f"at ${14 / _gpus(_QKV):g}k a GPU and month")),
    ),
    Claim(
        "section 2.4",
        "half the cache holds twice the context",
        "2x",
        Computed("2", lambda: _smaller("kv_tied", "300m"), "of a cache alone, from shapes"),
    ),
    Claim(
        "section 2.4",
        "half the cache gives twice the throughput, which is users a GPU there",
        "2x",
        OfItself(
            Computed(
                "2",
                lambda: _users(_KV_TIED) / _users(_QKV),
                "by section 3.3.3. Tokens/s are measured nowhere; under RoPE Q-K=V must rotate "
                "keys as it reads them (reports/decoding.md, Decode attention of "
                "one layer)",
            )
        ),
        "",
    ),
    Claim(
        "section 3.3.5",
        "at 1.2B MQA's cache is 33 times smaller, Q-MQA's 67 times, nearly 100, saving 99 %",
        "33x, 67x, nearly 100x, 99 %",
        Cases(
            lambda: {
                "33x": _smaller("mqa") == 33,
                "67x": _smaller("kv_tied_mqa") == 67,
                "nearly 100x": _smaller("kv_tied_mqa") >= 90,
                "99 %": round(100 - 100 / _smaller("kv_tied_mqa")) == 99,
            },
            lambda: (
                f"{_smaller('mqa'):.0f} and {_smaller('kv_tied_mqa'):.0f} times, saving "
                f"{100 - 100 / _smaller('kv_tied_mqa'):.1f} %"
            ),
        ),
        _TABLES,
    ),
    Claim(
        "section 3.3.5",
        "at 1.2B and 32K, 32 users' caches take 189 GB (QKV), 5.6 (MQA) or 2.8 (Q-MQA)",
        "189, 5.6, 2.8 GB",
        Cases(
            lambda: {
                name: f"{ours:.{0 if said > 100 else 1}f}" == f"{said}"
                for name, (said, ours) in _batch().items()
            },
            lambda: (
                ", ".join(f"{name} {ours:.1f} GB" for name, (_, ours) in _batch().items())
                + "; the paper's MB are 10^6 bytes of QKV and 2^20 of the others"
            ),
        ),
        _TABLES,
    ),
    Claim(
        "section 2.3",
        "grouping saves 1 - 1/(2g) of the cache",
        "",
        Cases(
            lambda: {name: abs(said - ours) < 0.05 for name, (said, ours) in _grouped().items()},
            lambda: (
                "; ".join(
                    f"{name}: {said:.1f} by the formula, {ours:.1f} % by shapes"
                    for name, (said, ours) in _grouped().items()
                )
                + "; 1 - g/(2H) is right, of H heads"
            ),
        ),
        _TABLES,
    ),
)
