"""MLA with a latent of 1024 and a decoupled RoPE key of 64: 50 layers, width 3200, 25 heads of 128.

The LRKV blog post's model at "6.3B". The post gives no KV heads, latent or budget: those here are
this project's choice.

    python -m kvjax.main --config=configs/mla_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 6,297,190,400 parameters, 6,087,475,200 without the input embedding; 108,800 cache bytes
per token in bfloat16; 41.440 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 2,072 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.17 days for 2,072 exaFLOPs: at most 96.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_6p3b", scale="6p3b", attention=recipes.mla(25, latent=1024))
