"""Other authors' mechanisms, and LRKV, with equally small caches and MHA's parameter count.

`*_wide_*` cache about as many elements per token and layer as LRKV of rank 64 (at tiny scale, of
rank 16), `*_narrow_*` about as many as MLA. MLP widths are chosen so that parameter counts equal
MHA's to 0.1 %. Tiny variants train on 4.1M tokens of the embedded corpus.
"""

from kvjax import recipes

# By name and scale: the attention section, and the width of the MLP.
RIVALS = {
    "gla_narrow": {
        "tiny": (recipes.gla(4, latents=2, latent=24, rope_dim=16, head_dim=32), 552),
        "128m": (recipes.gla(6, latents=2, latent=128), 3360),
        "2p5b": (recipes.gla(18, latents=2, latent=384), 10144),
    },
    "gta_narrow": {
        "tiny": (recipes.gta(4, kv_heads=2, head_dim=24, rope_dim=16), 640),
        "128m": (recipes.gta(6, kv_heads=2), 3680),
        "2p5b": (recipes.gta(18, kv_heads=6), 11104),
    },
    "gta_wide": {
        "tiny": (recipes.gta(4, kv_heads=4, head_dim=42, rope_dim=22), 504),
        "128m": (recipes.gta(8, kv_heads=4, head_dim=256, rope_dim=64), 2016),
        "2p5b": (recipes.gta(20, kv_heads=10, head_dim=256, rope_dim=64), 7392),
    },
    "lrkv_narrow": {
        "128m": (recipes.lrkv(6, rank=5), 3680),
        "2p5b": (recipes.lrkv(18, rank=16), 11088),
    },
    "mfa_kr_narrow": {
        "tiny": (recipes.mfa_kr(4, query_rank=96, kv_heads=2, head_dim=32), 572),
        "128m": (recipes.mfa_kr(6, query_rank=512, kv_heads=2, head_dim=160), 3376),
        "2p5b": (recipes.mfa_kr(10, query_rank=1536, kv_heads=2, head_dim=416), 9136),
    },
    "mfa_kr_wide": {
        "tiny": (recipes.mfa_kr(4, query_rank=96, kv_heads=4, head_dim=48), 446),
        "128m": (recipes.mfa_kr(8, query_rank=512, kv_heads=4), 2096),
        "2p5b": (recipes.mfa_kr(20, query_rank=1536, kv_heads=10), 7488),
    },
    "mfa_narrow": {
        "tiny": (recipes.mfa(4, query_rank=96, head_dim=32), 576),
        "128m": (recipes.mfa(8, query_rank=512, head_dim=160), 3120),
        "2p5b": (recipes.mfa(10, query_rank=1536, head_dim=416), 9184),
    },
    "mfa_wide": {
        "tiny": (recipes.mfa(4, query_rank=96, kv_heads=2, head_dim=48), 456),
        "128m": (recipes.mfa(6, query_rank=512, kv_heads=2), 2560),
        "2p5b": (recipes.mfa(20, query_rank=1536, kv_heads=5), 7520),
    },
    "mla_lrkv_narrow": {
        "tiny": (recipes.mla_lrkv(4, latent=16, rank=4, rope_dim=16, head_dim=32), 556),
        "128m": (recipes.mla_lrkv(6, latent=160, rank=8), 3328),
        "2p5b": (recipes.mla_lrkv(18, latent=192, rank=16), 10320),
    },
    "mla_lrkv_wide": {
        "tiny": (recipes.mla_lrkv(4, latent=48, rank=16, rope_dim=16, head_dim=32), 448),
        "128m": (recipes.mla_lrkv(6, latent=384, rank=48), 2704),
        "2p5b": (recipes.mla_lrkv(18, latent=768, rank=48), 8848),
    },
    "mlra2_narrow": {
        "tiny": (recipes.mlra(4, branches=2, latent=12, rope_dim=16, head_dim=32), 552),
        "128m": (recipes.mlra(6, branches=2, latent=64), 3360),
        "2p5b": (recipes.mlra(18, branches=2, latent=192), 10144),
    },
    "mlra4_narrow": {
        "tiny": (recipes.mlra(4, branches=4, latent=12, rope_dim=16, head_dim=32), 528),
        "128m": (recipes.mlra(6, branches=4, latent=64), 3232),
        "2p5b": (recipes.mlra(18, branches=4, latent=192), 9760),
    },
    "shared_kv_narrow": {
        "tiny": (recipes.shared_kv(4, kv_heads=2, head_dim=32, rope_dim=16), 608),
        "128m": (recipes.shared_kv(8, kv_heads=2, head_dim=160), 3168),
        "2p5b": (recipes.shared_kv(10, kv_heads=2, head_dim=416), 9248),
    },
    "shared_kv_wide": {
        "tiny": (recipes.shared_kv(4, kv_heads=4, head_dim=48, rope_dim=16), 480),
        "128m": (recipes.shared_kv(8, kv_heads=4, head_dim=256), 2048),
        "2p5b": (recipes.shared_kv(20, kv_heads=10, head_dim=256), 7424),
    },
    "tpa_kv_only_narrow": {
        "tiny": (recipes.tpa(4, query_factors=0, key_rank=1, value_rank=1, head_dim=32), 604),
        "128m": (recipes.tpa(6, query_factors=0, key_rank=1, value_rank=1), 3712),
        "2p5b": (recipes.tpa(18, query_factors=0, key_rank=3, value_rank=3), 11088),
    },
    "tpa_kv_only_wide": {
        "tiny": (recipes.tpa(4, query_factors=0, key_rank=3, value_rank=2, head_dim=32), 550),
        "128m": (recipes.tpa(6, query_factors=0, key_rank=4, value_rank=4), 3296),
        "2p5b": (recipes.tpa(18, query_factors=0, key_rank=9, value_rank=9), 10208),
    },
    "tpa_narrow": {
        "tiny": (recipes.tpa(4, key_rank=1, value_rank=1, head_dim=32), 560),
        "128m": (recipes.tpa(6, key_rank=1, value_rank=1), 3680),
        "2p5b": (recipes.tpa(18, key_rank=3, value_rank=3), 11808),
    },
    "tpa_wide": {
        "tiny": (recipes.tpa(4, key_rank=3, value_rank=2, head_dim=32), 506),
        "128m": (recipes.tpa(6, key_rank=4, value_rank=4), 3296),
        "2p5b": (recipes.tpa(18, key_rank=9, value_rank=9), 10912),
    },
}
VARIANTS = {
    f"{name}_{scale}": {"scale": scale, "attention": attention, "model": {"mlp_dim": mlp_dim}}
    for name, scales in RIVALS.items()
    for scale, (attention, mlp_dim) in scales.items()
}

PAPERS = {
    "gla": "Grouped latent attention (arXiv 2505.21487, section 3).",
    "gta": "Grouped-tied attention (arXiv 2505.21487, section 3).",
    "lrkv": "LRKV (arXiv 2601.11471) of a rank that makes its cache as small as MLA's.",
    "mfa": "Multi-matrix factorization attention (arXiv 2412.19255).",
    "mfa_kr": "MFA with keys reused as values (arXiv 2412.19255).",
    "mla_lrkv": "A latent for all heads and a low-rank residual per head (LRKV, future work 5).",
    "mlra2": "Multi-head low-rank attention with two branches (arXiv 2603.02188, section 3).",
    "mlra4": "Multi-head low-rank attention with four branches (arXiv 2603.02188, section 3).",
    "shared_kv": 'One vector as key and value with VO-RoPE ("S2", Su, kexue.fm 10862).',
    "tpa": "Tensor product attention (arXiv 2501.06425, equations 3.1 to 3.6).",
    "tpa_kv_only": "TPA with dense queries (arXiv 2501.06425, section 3).",
}
NOTES = {variant: PAPERS[variant.rsplit("_", 2)[0]] for variant in VARIANTS}


def get_config(variant):
    return recipes.pretrain(variant, **VARIANTS[variant])
