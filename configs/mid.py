"""Mid-training on conversations, for the LRKV paper's Table 3.

Papers: LRKV (arXiv 2601.11471) and its blog post. Each variant continues runs/VARIANT
(config.train.parent), a run of the plain file of that name (mla_l384_2p5b: of configs/papers.py).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture), one pass over
567,656 conversations, about 700 steps.
"""

from kvjax import recipes

ATTENTION = {
    "128m": {
        "mha": recipes.mha(6),
        "gqa": recipes.gqa(6, kv_heads=3),
        "mqa": recipes.mqa(6),
        "lrkv": recipes.lrkv(6, rank=64),
        "mla": recipes.mla(6, latent=256),
        "mla_paper": recipes.mla_paper(6, latent=256),
    },
    "2p5b": {
        "mha": recipes.mha(18),
        "gqa": recipes.gqa(18, kv_heads=6),
        "mqa": recipes.mqa(18),
        "lrkv": recipes.lrkv(18, rank=64),
        "mla": recipes.mla(18, latent=768),
        "mla_l384": recipes.mla(18, latent=384),
        "mla_paper": recipes.mla_paper(18, latent=768),
    },
    "6p3b": {
        "mha": recipes.mha(25),
        "gqa": recipes.gqa(25, kv_heads=5),
        "mqa": recipes.mqa(25),
        "lrkv": recipes.lrkv(25, rank=64),
        "mla": recipes.mla(25, latent=1024),
        "mla_paper": recipes.mla_paper(25, latent=1024),
    },
}
VARIANTS = {
    f"{name}_{scale}": {"scale": scale, "attention": attention}
    for scale, mechanisms in ATTENTION.items()
    for name, attention in mechanisms.items()
}
VARIANTS["lrkv_tiny"] = {
    "scale": "tiny",
    "attention": recipes.lrkv(4, rank=16, head_dim=32),
    "data": {"sequence_length": 256, "vocab_size": 2056},
    "train": {
        "num_steps": 200,
        "batch_size": 8,
        "eval_every": 50,
        "eval_rows": 0,
        "checkpoint_every": 50,
    },
    "mixture": dict(recipes.EMBEDDED_CONVERSATIONS),
}

_TASKS = ("ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K", "HumanEval", "mean of the five")
_TABLE_3 = {
    "mha": (66.6, 47.1, 39.3, 10.2, 13.4, 35.3),
    "gqa": (65.4, 49.6, 40.5, 10.0, 13.4, 35.8),
    "mqa": (65.2, 47.3, 40.2, 10.3, 3.7, 33.3),
    "lrkv": (70.7, 53.8, 42.2, 11.3, 11.7, 37.9),
    "mla": (67.5, 51.5, 41.9, 10.8, 12.8, 36.9),
}
_NO_ROPE_KEY = " Counted as the paper does: no RoPE key."
NOTES = {
    f"{name}_{scale}": f'The blog post at "{size}": LRKV\'s mean of five evaluations {mean}.'
    for scale, size, mean in (("128m", "128M", 18.9), ("6p3b", "6.3B", 40.2))
    for name in ATTENTION[scale]
}
for _name in ATTENTION["2p5b"]:
    _scores = zip(_TASKS, _TABLE_3[_name.partition("_")[0]], strict=True)
    NOTES[f"{_name}_2p5b"] = f"Table 3: {', '.join(f'{task} {x}' for task, x in _scores)}."
for _scale in ATTENTION:
    NOTES[f"mla_paper_{_scale}"] += _NO_ROPE_KEY
NOTES["mla_l384_2p5b"] += " Its MLA has a latent of 384."
NOTES["lrkv_tiny"] = (
    "No paper: about a minute on two CPU cores, on 500 generated conversations (letters, and small "
    "sums with calls of the calculator). The parent's vocabulary grows by eight tokens. Measured, "
    "one seed: of 200 conversations of another seed 100 of 100 letters are right, and 95 of 100 "
    "sums."
)


def get_config(variant):
    return recipes.mid_train(f"mid/{variant}", **VARIANTS[variant])
