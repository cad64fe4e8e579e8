"""LRKV of rank 46: 36 layers, width 2304, 18 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) at 2.5B with 0.36 of the head dim, the least of the
ranks that the blog post recommends.

    python -m kvjax.main --config=configs/ranks/lrkv_r46_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,379,239,424 parameters, 2,228,244,480 without the input embedding; 140,256 cache bytes
per token in bfloat16; 15.408 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 770 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.18 days for 770 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r46_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=46))
