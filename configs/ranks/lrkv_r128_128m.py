"""LRKV of rank 128: 12 layers, width 768, 6 heads of 128.

No paper's figure: the end of the rank ablation that the LRKV blog post shows without its
numbers. The residual is of full rank: every head is free, and the cache larger than MHA's.

    python -m kvjax.main --config=configs/ranks/lrkv_r128_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 190,316,544 parameters, 139,984,896 without the input embedding; 43,296 cache bytes
per token in bfloat16; 1.066 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 107 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 107 exaFLOPs: at most 97.3% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r128_128m", scale="128m", attention=recipes.lrkv(6, rank=128))
