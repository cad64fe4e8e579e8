"""LRKV over a latent of 264, residuals of rank 14: 36 layers, width 2304, 18 heads of 128.

A latent for all heads and low-rank residuals of each (LRKV, future work 5): attention/mla_lrkv.py.
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mla_lrkv_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,596,220,928 parameters, 2,445,225,984 without the input embedding; 59,904 cache bytes
per token in bfloat16; 17.219 GFLOP per trained token.
Matched: 2,596,220,928 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.038 %;
MLP of 10,256 for 9,216.
Budget: 50B tokens in steps of 262,144: 861 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least: not known, not compiled yet.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_lrkv_narrow_2p5b",
        scale="2p5b",
        attention=recipes.mla_lrkv(18, latent=264, rank=14),
        model=dict(mlp_dim=10256),
    )
