"""Shared KV with 10 KV heads of 256: 36 layers, width 2304, 20 heads of 256.

One vector as key and value with VO-RoPE ("S2", Su, kexue.fm 10862).
Cached per token and layer: 2,560 elements beside the 2,560 of lrkv_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/shared_kv_wide_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 184,320 cache bytes
per token in bfloat16; 19.195 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.000 %;
MLP of 7,424 for 9,216.
Budget: 50B tokens in steps of 262,144: 960 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.40 days for 960 exaFLOPs: at most 95.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "shared_kv_wide_2p5b",
        scale="2p5b",
        attention=recipes.shared_kv(20, kv_heads=10, dim=256),
        model=dict(mlp_dim=7424),
    )
