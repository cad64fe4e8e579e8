"""LRKV over 6 KV heads of rank 64 on one base: 36 layers, width 2304, 18 heads of 128.

LRKV over groups: fewer KV heads than heads, each with a residual (arXiv 2601.11471, future work).
The mechanism of lrkv_gqa_tiny.py at the LRKV paper's scale d36; no paper reports it.

    python -m kvjax.main --config=configs/lrkv_gqa_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,301,493,248 parameters, 2,150,498,304 without the input embedding; 74,592 cache bytes
per token in bfloat16; 14.941 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 747 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.14 days for 747 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_gqa_2p5b", scale="2p5b", attention=recipes.grouped(18, kv_heads=6, bases=1, rank=64)
    )
