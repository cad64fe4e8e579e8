"""LRKV of ranks other than 64: eight at 128M, three at 2.5B and 6.3B.

Papers: LRKV (arXiv 2601.11471) and its blog post. The post plots an ablation of ranks at 128M
without numbers, and recommends ranks of 0.36 to 0.43 of the head dim. Rank 64 is
configs/lrkv_128m.py and so on.
"""

from kvjax import recipes

HEADS = {"128m": 6, "2p5b": 18, "6p3b": 25}
RANKS = {"128m": (0, 8, 16, 32, 46, 55, 96, 128), "2p5b": (16, 46, 55), "6p3b": (16, 46, 55)}
VARIANTS = {
    f"lrkv_r{rank}_{scale}": {"scale": scale, "attention": recipes.lrkv(HEADS[scale], rank=rank)}
    for scale, ranks in RANKS.items()
    for rank in ranks
}

_LEAST = "0.36 of the head dim, the least rank that the blog post recommends"
_MOST = "0.43 of the head dim, the largest rank that the blog post recommends"
NOTES = {
    "lrkv_r0_128m": "No residual: MQA, the model of mqa_128m; an end of the blog post's ablation.",
    "lrkv_r8_128m": "The blog post's ablation.",
    "lrkv_r16_128m": "LRKV, section 6.3, Table 5 and Figure 9, r = 16: test BPB 0.881.",
    "lrkv_r32_128m": "The blog post's ablation.",
    "lrkv_r46_128m": f"{_LEAST}. The cache of 52.6 % that the paper gives to r = 64 is this one's "
    "by its eq. 6.",
    "lrkv_r55_128m": f"{_MOST}.",
    "lrkv_r96_128m": "The blog post's ablation.",
    "lrkv_r128_128m": "Full rank: heads are independent, and the cache is larger than MHA's; an "
    "end of the blog post's ablation.",
    "lrkv_r16_2p5b": "The paper's small rank, which it trains at 128M only.",
    "lrkv_r46_2p5b": f"{_LEAST}.",
    "lrkv_r55_2p5b": f"{_MOST}; its 48.4 % of MHA's cache at this scale would be r = 54.8.",
    "lrkv_r16_6p3b": "The paper's small rank, which it trains at 128M only.",
    "lrkv_r46_6p3b": f"{_LEAST}.",
    "lrkv_r55_6p3b": f"{_MOST}.",
}


def get_config(variant):
    return recipes.pretrain(variant, **VARIANTS[variant])
