"""TPA of ranks 6, 4 and 4: 12 layers, width 768, 6 heads of 128.

Tensor product attention (TPA, arXiv 2501.06425, equations 3.1 to 3.6).
Cached per token and layer: 1,072 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/tpa_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,782,272 parameters, 135,450,624 without the input embedding; 25,728 cache bytes
per token in bfloat16; 1.040 GFLOP per trained token.
Matched: 185,782,272 parameters here, 185,597,952 in mha_128m, a difference of +0.099 %;
MLP of 3,296 for 3,072.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_wide_128m",
        scale="128m",
        attention=recipes.tpa(6, key_rank=4, value_rank=4),
        model=dict(mlp_dim=3296),
    )
