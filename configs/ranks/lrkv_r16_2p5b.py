"""LRKV of rank 16: 36 layers, width 2304, 18 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) at 2.5B with the paper's small rank, which it trains
at d12 only.

    python -m kvjax.main --config=configs/ranks/lrkv_r16_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,284,683,264 parameters, 2,133,688,320 without the input embedding; 62,496 cache bytes
per token in bfloat16; 14.841 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 742 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.13 days for 742 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r16_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=16))
