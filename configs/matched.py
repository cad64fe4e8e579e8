"""Models with MHA's parameter count, and pairs of models with equal caches.

The LRKV paper (arXiv 2601.11471) compares models of different sizes. In `*_matched_*` the MLP is
widened until the parameter count is exactly MHA's. The other variants form pairs of GQA and LRKV
whose caches differ by less than 0.6 %.
"""

from kvjax import recipes

# By scale and mechanism: the attention section, and the width of the MLP.
MATCHED = {
    "128m": {
        "lrkv": (recipes.lrkv(6, rank=64), 3264),
        "gqa": (recipes.gqa(6, kv_heads=3), 3456),
        "mqa": (recipes.mqa(6), 3712),
        "mla": (recipes.mla(6, latent=256), 3232),
    },
    "2p5b": {
        "lrkv": (recipes.lrkv(18, rank=64), 10176),
        "gqa": (recipes.gqa(18, kv_heads=6), 10752),
        "mqa": (recipes.mqa(18), 11392),
        "mla": (recipes.mla(18, latent=768), 9760),
    },
    "6p3b": {
        "lrkv": (recipes.lrkv(25, rank=64), 14208),
        "gqa": (recipes.gqa(25, kv_heads=5), 15360),
        "mqa": (recipes.mqa(25), 15872),
        "mla": (recipes.mla(25, latent=1024), 13632),
    },
}
VARIANTS = {
    f"{name}_matched_{scale}": {
        "scale": scale,
        "attention": attention,
        "model": {"mlp_dim": mlp_dim},
    }
    for scale, mechanisms in MATCHED.items()
    for name, (attention, mlp_dim) in mechanisms.items()
}
VARIANTS |= {
    "lrkv_r42_128m": {"scale": "128m", "attention": recipes.lrkv(6, rank=42)},
    "lrkv_r56_2p5b": {"scale": "2p5b", "attention": recipes.lrkv(18, rank=56)},
    "gqa9_2p5b": {"scale": "2p5b", "attention": recipes.gqa(18, kv_heads=9)},
}

NOTES = {
    "lrkv_r42_128m": "The cache of gqa_128m. Rank 64 caches as much as 4 KV heads; 4 does not "
    "divide 6, 3 does.",
    "lrkv_r56_2p5b": "The cache of gqa9_2p5b.",
    "gqa9_2p5b": "The cache of lrkv_r56_2p5b. LRKV of rank 64 caches as much as 10 KV heads; 10 "
    "does not divide 18, 9 does.",
}


def get_config(variant):
    return recipes.pretrain(variant, **VARIANTS[variant])
