"""LRKV of rank 16: 50 layers, width 3200, 25 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) at 6.3B with the paper's small rank, which it trains
at d12 only.

    python -m kvjax.main --config=configs/ranks/lrkv_r16_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 5,713,510,400 parameters, 5,503,795,200 without the input embedding; 110,600 cache bytes
per token in bfloat16; 36.955 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 1,848 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 2.84 days for 1,848 exaFLOPs: at most 97.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r16_6p3b", scale="6p3b", attention=recipes.lrkv(25, rank=16))
