"""LRKV of rank 55: 50 layers, width 3200, 25 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) at 6.3B with 0.43 of the head dim, the most of the
ranks that the blog post recommends.

    python -m kvjax.main --config=configs/ranks/lrkv_r55_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 6,037,990,400 parameters, 5,828,275,200 without the input embedding; 305,600 cache bytes
per token in bfloat16; 38.902 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 1,945 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.00 days for 1,945 exaFLOPs: at most 97.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r55_6p3b", scale="6p3b", attention=recipes.lrkv(25, rank=55))
