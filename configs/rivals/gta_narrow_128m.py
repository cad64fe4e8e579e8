"""GTA with 2 KV heads of 128: 12 layers, width 768, 6 heads of 128.

Grouped-tied attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/gta_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 3,680 for 3,072.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gta_narrow_128m",
        scale="128m",
        attention=recipes.gta(6, kv_heads=2),
        model=dict(mlp_dim=3680),
    )
