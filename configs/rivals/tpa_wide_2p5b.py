"""TPA of ranks 6, 9 and 9: 36 layers, width 2304, 18 heads of 128.

Tensor product attention (TPA, arXiv 2501.06425, equations 3.1 to 3.6).
Cached per token and layer: 2,628 elements beside the 2,560 of lrkv_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/tpa_wide_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,593,898,496 parameters, 2,442,903,552 without the input embedding; 189,216 cache bytes
per token in bfloat16; 16.708 GFLOP per trained token.
Matched: 2,593,898,496 parameters here, 2,595,225,600 in mha_2p5b, a difference of -0.051 %;
MLP of 10,912 for 9,216.
Budget: 50B tokens in steps of 262,144: 835 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.28 days for 835 exaFLOPs: at most 96.3% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_wide_2p5b",
        scale="2p5b",
        attention=recipes.tpa(18, key_rank=9, value_rank=9),
        model=dict(mlp_dim=10912),
    )
