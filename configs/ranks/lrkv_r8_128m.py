"""LRKV of rank 8: 12 layers, width 768, 6 heads of 128.

The paper's: the rank ablation of the LRKV blog post, shown without its numbers.

    python -m kvjax.main --config=configs/ranks/lrkv_r8_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 174,833,664 parameters, 124,502,016 without the input embedding; 8,736 cache bytes
per token in bfloat16; 0.974 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 97 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.32 days for 97 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r8_128m", scale="128m", attention=recipes.lrkv(6, rank=8))
