"""LRKV of rank 56: 36 layers, width 2304, 18 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) with the cache of GQA-9, the nearest number of KV
heads to rank 64's cache (10) that divides 18.

    python -m kvjax.main --config=configs/matched/lrkv_r56_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,410,758,144 parameters, 2,259,763,200 without the input embedding; 166,176 cache bytes
per token in bfloat16; 15.597 GFLOP per trained token.
Equal cache: 166,176 bytes per token here, 165,888 in gqa9_2p5b, a difference of +0.2 %.
Budget: 50B tokens in steps of 262,144: 780 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.20 days for 780 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r56_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=56))
