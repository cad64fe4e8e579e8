"""GQA with 5 KV heads: 50 layers, width 3200, 25 heads of 128.

The LRKV blog post's model at "6.3B". The post gives no KV heads, latent or budget: those here are
this project's choice.

    python -m kvjax.main --config=configs/gqa_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 5,744,230,400 parameters, 5,534,515,200 without the input embedding; 128,000 cache bytes
per token in bfloat16; 37.139 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 1,857 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 2.86 days for 1,857 exaFLOPs: at most 97.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("gqa_6p3b", scale="6p3b", attention=recipes.gqa(25, kv_heads=5))
