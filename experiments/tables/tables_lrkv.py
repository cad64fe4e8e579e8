"""LRKV (arXiv 2601.11471): eq. 5 to 7, Tables 1, 2 and 4, and the ratios of its blog post."""

import functools

from flax import nnx
import jax
import numpy as np

from experiments.tables.paper_figure import Figure, cache_bytes
from kvjax import config as config_lib, recipes
from kvjax.model.config import TransformerConfig

HEADS = {"128m": 6, "2p5b": 18, "6p3b": 25}
LATENT = {"128m": 256, "2p5b": 768}
NAMES = {"128m": "d12", "2p5b": "d36", "6p3b": "d50"}
H = recipes.HEAD_DIM


def at_scale(scale: str, attention: dict, **keys) -> TransformerConfig:
    """Returns a model of one of LRKV's scales with a mechanism of `recipes`.

    Args:
      keys: replace keys of `attention`.
    """
    return config_lib.resolve(recipes.pretrain("x", scale=scale, attention=attention | keys)).model


def lrkv(scale: str, rank: int, **keys) -> TransformerConfig:
    """Returns LRKV as the paper counts it: without the cached 1/rms of normalised keys."""
    return at_scale(scale, recipes.lrkv(HEADS[scale], rank=rank), **{"qk_norm": "none"} | keys)


def against_mha(scale: str, config: TransformerConfig) -> float:
    """Returns a model's cache as a percentage of MHA's."""
    return 100 * cache_bytes(config) / cache_bytes(at_scale(scale, recipes.mha(HEADS[scale])))


def key_value_parameters(config: TransformerConfig) -> int:
    """Returns the number of key and value weights of one layer."""
    shapes = nnx.eval_shape(
        lambda: config.mechanisms[0].build(config.block.d_model, rngs=nnx.Rngs(0))
    )
    paths = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(shapes)))
    return sum(leaf.size for path, leaf in paths if path[0].key != "query")


def equations() -> dict[str, list[Figure]]:
    cache, ratio, weights = [], [], []
    for scale, N in HEADS.items():
        r, config = 64, lrkv(scale, 64)
        d = config.block.d_model
        name = f"{NAMES[scale]}, H = {N}, r = 64"
        per_layer = cache_bytes(config) / config.block.num_layers
        cache.append(Figure(name, "elements per token", f"{2 * (H + N * r):,}", per_layer / 2))
        formula = f"{100 * (1 / N + r / H):.2f}"
        ratio.append(Figure(name, "% of MHA", formula, against_mha(scale, config)))
        formula = f"{2 * d * H + 2 * N * r * (d + H):,}"
        weights.append(Figure(name, "K/V weights per layer", formula, key_value_parameters(config)))
    return {
        "LRKV eq. 5: 2(d_h + Hr) per token and layer": cache,
        "LRKV eq. 6: 1/H + r/d_h": ratio,
        "LRKV eq. 7: 2·d·d_h + 2Hr(d + d_h)": weights,
    }


# Ranks are computed at a quarter of d12's width, six heads of 32, where an SVD is quick.
WIDTH, SMALL = 192, 32


def random_heads(attention: dict, name: str = "key") -> tuple[np.ndarray, np.ndarray | None]:
    """Returns random projections [N, D, H] of all query heads, and the shared [D, H], if any."""
    mechanism = at_scale("128m", attention, qk_norm="none").mechanisms[0]
    module = mechanism.build(WIDTH, rngs=nnx.Rngs(0))

    def read(w):
        return np.asarray(w[...], np.float64)

    if attention["kind"] == "mla_paper":
        return np.einsum(
            "DC,CNH->NDH", read(module.down), read(getattr(module, f"up_{name}"))
        ), None
    base = np.moveaxis(read(getattr(module, f"base_{name}")), 1, 0)
    N, K = attention["num_heads"], attention["num_kv_heads"]
    W = np.repeat(base, K // len(base), axis=0)
    if attention["rank"]:
        latent, expand = (
            read(getattr(module, f"{factor}_{name}")) for factor in ("latent", "expand")
        )
        W = W + np.einsum("DKR,KRH->KDH", latent, expand)
    return np.repeat(W, N // K, axis=0), base[0]


def table_1() -> dict[str, list[Figure]]:
    """Computes ranks of random weights, with d_c, r and d_h in d12's proportions."""
    rank = np.linalg.matrix_rank

    def joint(W):
        return rank(np.concatenate(W, axis=1))

    mha, _ = random_heads(recipes.mha(6, head_dim=SMALL))
    mqa, shared = random_heads(recipes.mqa(6, head_dim=SMALL))
    gqa, _ = random_heads(recipes.gqa(6, kv_heads=3, head_dim=SMALL))
    mla, _ = random_heads(recipes.mla_paper(6, latent=64, head_dim=SMALL))
    rows = [
        Figure("MHA: rank(W_h), full", "rank", "32", rank(mha).min()),
        Figure("MHA: rank of all heads side by side", "rank", "192", joint(mha)),
        Figure("MQA: rank(W_h - W_shared)", "rank", "0", rank(mqa - shared).max()),
        Figure(
            "GQA-3: rank(W_h - W_g(h)) within a group",
            "rank",
            "0",
            rank(gqa[::2] - gqa[1::2]).max(),
        ),
        Figure("GQA-3: rank(W_h), full", "rank", "32", rank(gqa).min()),
        Figure(
            "MLA, d_c = 64: rank(W_h)",
            "rank",
            "≤ 64",
            rank(mla).max(),
            note="binds nothing where d_c ≥ d_h: a head is of full rank 32",
        ),
        Figure(
            "MLA, d_c = 64: rank of all heads side by side",
            "rank",
            "≤ 64",
            joint(mla),
            note="this is the constraint: the heads' joint rank is d_c",
        ),
    ]
    for r in (16, 4):
        for name in ("key", "value"):
            W, shared = random_heads(recipes.lrkv(6, rank=r, head_dim=SMALL), name)
            what = f"LRKV, r = {r}: rank(W_h - W_shared), {name}s"
            rows.append(Figure(what, "rank", f"≤ {r}", rank(W - shared).max()))
    return {"LRKV Table 1: rank constraints, in random weights, D = 192, d_h = 32": rows}


def table_2() -> dict[str, list[Figure]]:
    rows = []
    swapped = "the paper's two figures are swapped"
    for scale, gqa, mqa in (("128m", "50", "5.6"), ("2p5b", "33", "16.7")):
        N, name = HEADS[scale], NAMES[scale]
        ratio = functools.partial(against_mha, scale)

        def percent(what, paper, config, why="", name=name, ratio=ratio):
            rows.append(Figure(f"{name}, {what}", "% of MHA", paper, ratio(config), why))

        kv_heads = {"128m": 3, "2p5b": 6}[scale]
        percent(f"GQA-{kv_heads}", gqa, at_scale(scale, recipes.gqa(N, kv_heads=kv_heads)))
        percent("MQA", mqa, at_scale(scale, recipes.mqa(N)), swapped)
        C = LATENT[scale]
        paper_mla = at_scale(scale, recipes.mla_paper(N, latent=C))
        percent(f"MLA, latent {C}, no RoPE key", "16.7", paper_mla)
        no_key = "the paper counts no RoPE key; with one of 64, C + P = " + str(C + 64)
        percent(f"MLA, latent {C}", "16.7", at_scale(scale, recipes.mla(N, latent=C)), no_key)
        one_rank = "eq. 6; 52.6 % is r = 46 at d12, and no rank at d36"
        percent("LRKV, r = 64", "52.6", lrkv(scale, 64), one_rank)
        with_norm = "the same, with the float32 1/rms per KV head that QK-norm adds"
        percent("LRKV, r = 64, normed keys", "52.6", lrkv(scale, 64, qk_norm="rms"), with_norm)
    times = 100 / against_mha("2p5b", lrkv("2p5b", 64))
    why = "1/52.6 % is 1.90, 1/eq. 6 is 1.80"
    rows.append(Figure("d36, LRKV, r = 64: reduction", "x", "2.3", times, why))
    return {"LRKV Table 2: cache": rows}


def blog() -> dict[str, list[Figure]]:
    fixed = "eq. 6 depends on H: no one rank or r/d_h gives 45 to 53 % at every scale"
    rows = [
        Figure("r = 46, r/d_h", "", "0.36", 46 / H),
        Figure("r = 55, r/d_h", "", "0.43", 55 / H),
    ]
    for scale, name in NAMES.items():
        for r in (46, 55, 64):
            ours = against_mha(scale, lrkv(scale, r))
            rows.append(Figure(f"{name}, r = {r}", "% of MHA", "45 to 53", ours, fixed))
    ours, why = against_mha("2p5b", lrkv("2p5b", 55)), "48.4 would be r = 54.8, which is no rank"
    rows.append(Figure("d36, r = 55", "% of MHA", "48.4", ours, why))
    ours = against_mha("128m", lrkv("128m", 46))
    rows.append(Figure("d12, r = 46: the paper's 52.6 for r = 64", "% of MHA", "52.6", ours))
    return {"LRKV blog: 45-53 % at r = 0.36-0.43·d_h, 48.4 % at d36": rows}


def table_4() -> dict[str, list[Figure]]:
    """Uses d12 (H = 6) with d_c = 128, r = 16, G = 3, keys not normed."""
    N, r, C = 6, 16, 128
    mechanisms = {
        "MHA": recipes.mha(N),
        "MQA": recipes.mqa(N),
        "GQA-3": recipes.gqa(N, kv_heads=3),
        "MLA absorbed, RoPE key of 64": recipes.mla(N, latent=C),
        "MLA, RoPE on rebuilt keys": recipes.mla_paper(N, latent=C),
        "LRKV, RoPE on the base only": recipes.lrkv(N, rank=r) | dict(rope="shared"),
        "LRKV": recipes.lrkv(N, rank=r),
    }
    models = {k: at_scale("128m", m, qk_norm="none") for k, m in mechanisms.items()}
    flops = {name: c.mechanisms[0].decode_flops(c.block.angles_base) for name, c in models.items()}
    no_key = "the paper counts no RoPE key: d_c + 64"
    printed = {
        "MHA": (f"{2 * N * H:,}", "0", ""),
        "MQA": (f"{2 * H}", "0", ""),
        "GQA-3": (f"{2 * 3 * H}", "0", ""),
        "MLA absorbed, RoPE key of 64": (
            f"{C}",
            f"{4 * N * C * H:,}",
            "linear in T, but W_up is folded into query and output, once per step: no expansion "
            "per cached token; 2N(2C + P - 2d_h)",
        ),
        "MLA, RoPE on rebuilt keys": (
            f"{C}",
            f"{4 * N * C * H:,}",
            "keys are expanded for every cached token, O(T·d_c·d_h) as the paper says; values are "
            "not (eq. 4), and rotating costs 3N·d_h",
        ),
        "LRKV, RoPE on the base only": (
            f"{2 * (H + N * r)}",
            "0",
            "4Nr for the latents: linear in T, as section 3's O(Lr + r·d_h) says and Table 4 not",
        ),
        "LRKV": (
            f"{2 * (H + N * r)}",
            "0",
            "RoPE stands between q and B, so eq. 3 fails: q is folded into B at each position, "
            "2Nr·d_h, or 2Nr·57·1.25 through a basis of 512 positions' angles; linear in T",
        ),
    }
    cache, extra = [], []
    for name, (elements, per_token, why) in printed.items():
        why_cache = no_key if name.startswith("MLA abs") else ""
        ours = cache_bytes(models[name]) / 2 / models[name].block.num_layers
        cache.append(Figure(name, "elements", elements, ours, why_cache))
        beyond = flops[name].per_key - flops["MHA"].per_key
        extra.append(Figure(name, "FLOP per cached token and layer", per_token, beyond, why))
    once = Figure(
        "LRKV, RoPE on the base only: once per step, 4Nr·d_h",
        "FLOP per layer",
        f"{4 * N * r * H:,}",
        flops["LRKV, RoPE on the base only"].per_query,
    )
    return {
        "LRKV Table 4: cache per token and layer": cache,
        "LRKV Table 4: work beyond MHA's attention (its O(·): 2 per multiply-add)": [*extra, once],
    }


TABLES = (equations, table_1, table_2, blog, table_4)
