"""GTA with 6 KV heads of 128: 36 layers, width 2304, 18 heads of 128.

Grouped-tied attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/gta_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 59,904 cache bytes
per token in bfloat16; 16.704 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.000 %;
MLP of 11,104 for 9,216.
Budget: 50B tokens in steps of 262,144: 835 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.29 days for 835 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gta_narrow_2p5b",
        scale="2p5b",
        attention=recipes.gta(18, kv_heads=6),
        model=dict(mlp_dim=11104),
    )
