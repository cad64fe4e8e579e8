"""LRKV of rank 46: 12 layers, width 768, 6 heads of 128.

The paper's: the rank ablation of the LRKV blog post, shown without its numbers; 0.36 of the head
dim. The cache of 52.6 % that the paper (arXiv 2601.11471) gives to r = 64 is this one's, by its
eq. 6.

    python -m kvjax.main --config=configs/ranks/lrkv_r46_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 179,736,576 parameters, 129,404,928 without the input embedding; 19,680 cache bytes
per token in bfloat16; 1.003 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 100 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.34 days for 100 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r46_128m", scale="128m", attention=recipes.lrkv(6, rank=46))
