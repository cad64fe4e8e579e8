"""LRKV of rank 96: 12 layers, width 768, 6 heads of 128.

The paper's: the rank ablation of the LRKV blog post, shown without its numbers.

    python -m kvjax.main --config=configs/ranks/lrkv_r96_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 186,187,776 parameters, 135,856,128 without the input embedding; 34,080 cache bytes
per token in bfloat16; 1.042 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r96_128m", scale="128m", attention=recipes.lrkv(6, rank=96))
