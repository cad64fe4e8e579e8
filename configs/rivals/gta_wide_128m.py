"""GTA with 4 KV heads of 256: 12 layers, width 768, 8 heads of 256.

Grouped-tied attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 1,088 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/gta_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 26,112 cache bytes
per token in bfloat16; 1.416 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 2,016 for 3,072.
Budget: 100B tokens in steps of 524,288: 142 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.43 days for 142 exaFLOPs: at most 95.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gta_wide_128m",
        scale="128m",
        attention=recipes.gta(8, kv_heads=4, dim=256, rope_dim=64),
        model=dict(mlp_dim=2016),
    )
