"""LRKV over 3 KV heads of rank 64 on one base: 12 layers, width 768, 6 heads of 128.

LRKV over groups: fewer KV heads than heads, each with a residual (arXiv 2601.11471, future work).
The mechanism of lrkv_gqa_tiny.py at the LRKV paper's scale d12; no paper reports it.

    python -m kvjax.main --config=configs/lrkv_gqa_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 177,930,240 parameters, 127,598,592 without the input embedding; 15,504 cache bytes
per token in bfloat16; 0.992 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 99 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.33 days for 99 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_gqa_128m", scale="128m", attention=recipes.grouped(6, kv_heads=3, bases=1, rank=64)
    )
