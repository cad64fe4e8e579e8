"""LRKV of rank 64: 50 layers, width 3200, 25 heads of 128.

The LRKV blog post's model at "6.3B". The post gives no KV heads, latent or budget: those here are
this project's choice.

    python -m kvjax.main --config=configs/lrkv_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 6,112,870,400 parameters, 5,903,155,200 without the input embedding; 350,600 cache bytes
per token in bfloat16; 39.351 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 1,968 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.04 days for 1,968 exaFLOPs: at most 97.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_6p3b", scale="6p3b", attention=recipes.lrkv(25, rank=64))
