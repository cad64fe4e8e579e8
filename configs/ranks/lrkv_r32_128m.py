"""LRKV of rank 32: 12 layers, width 768, 6 heads of 128.

The paper's: the rank ablation of the LRKV blog post, shown without its numbers.

    python -m kvjax.main --config=configs/ranks/lrkv_r32_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 177,930,240 parameters, 127,598,592 without the input embedding; 15,648 cache bytes
per token in bfloat16; 0.992 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 99 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.33 days for 99 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r32_128m", scale="128m", attention=recipes.lrkv(6, rank=32))
