"""LRKV of rank 55: 12 layers, width 768, 6 heads of 128.

The paper's: the rank ablation of the LRKV blog post, shown without its numbers; 0.43 of the head
dim.

    python -m kvjax.main --config=configs/ranks/lrkv_r55_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 180,897,792 parameters, 130,566,144 without the input embedding; 22,272 cache bytes
per token in bfloat16; 1.010 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 101 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.34 days for 101 exaFLOPs: at most 97.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r55_128m", scale="128m", attention=recipes.lrkv(6, rank=55))
