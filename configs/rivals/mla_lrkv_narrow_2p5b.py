"""LRKV over a latent of 192, residuals of rank 16: 36 layers, width 2304, 18 heads of 128.

A latent for all heads and low-rank residuals of each (LRKV, future work 5): attention/mla_lrkv.py.
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mla_lrkv_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 59,904 cache bytes
per token in bfloat16; 17.213 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.000 %;
MLP of 10,320 for 9,216.
Budget: 50B tokens in steps of 262,144: 861 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.31 days for 861 exaFLOPs: at most 95.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_lrkv_narrow_2p5b",
        scale="2p5b",
        attention=recipes.mla_lrkv(18, latent=192, rank=16),
        model=dict(mlp_dim=10320),
    )
