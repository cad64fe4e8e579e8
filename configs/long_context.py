"""Rows of 8K, 32K and 128K tokens at 2.5B.

The LRKV blog post plots a comparison on rows of 8K without numbers; scale and budget here are this
project's choice. The paper (arXiv 2601.11471, section 7) leaves longer rows to future work. From
32K on a row is split over chips. At 128K RoPE's base is 500,000: with 10,000 its longest wavelength
is 54,410 tokens, less than half a row. Rows of 2K are configs/lrkv_2p5b.py and so on.
"""

from kvjax import recipes

ATTENTION = {
    "lrkv": recipes.lrkv(18, rank=64),
    "mha": recipes.mha(18),
    "gqa": recipes.gqa(18, kv_heads=6),
    "mla": recipes.mla(18, latent=768),
    "mqa": recipes.mqa(18),
}
ROWS = {
    "8k": {
        "data": {"sequence_length": 8_192},
        "train": {"batch_size": 32, "eval_rows": 1280},
    },
    "32k": {
        "data": {"sequence_length": 32_768},
        "train": {"batch_size": 8, "eval_rows": 320},
        "mesh": {"sequence": 2},
    },
    "128k": {
        "data": {"sequence_length": 131_072},
        "train": {"batch_size": 2, "eval_rows": 80},
        "mesh": {"sequence": 8},
        "model": {"rope_base": 500_000.0},
    },
}
VARIANTS = {
    f"{name}_{length}_2p5b": {"scale": "2p5b", "attention": attention, **sections}
    for name, attention in ATTENTION.items()
    for length, sections in ROWS.items()
    if name != "mqa" or length == "8k"
}
VARIANTS["mla_128k_2p5b"]["compute"] = {"remat": "attention"}

NOTES = {
    "mla_128k_2p5b": 'Rematerialises everything but attention: "dots" takes 107.5 % of the memory.'
}


def get_config(variant):
    return recipes.pretrain(variant, **VARIANTS[variant])
