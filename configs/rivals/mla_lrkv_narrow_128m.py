"""LRKV over a latent of 160, residuals of rank 8: 12 layers, width 768, 6 heads of 128.

A latent for all heads and low-rank residuals of each (LRKV, future work 5): attention/mla_lrkv.py.
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mla_lrkv_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,745,408 parameters, 135,413,760 without the input embedding; 7,680 cache bytes per
token in bfloat16; 1.096 GFLOP per trained token.
Matched: 185,745,408 parameters here, 185,597,952 in mha_128m, a difference of +0.079 %;
MLP of 3,328 for 3,072.
Budget: 100B tokens in steps of 524,288: 110 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 110 exaFLOPs: at most 96.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_lrkv_narrow_128m",
        scale="128m",
        attention=recipes.mla_lrkv(6, latent=160, rank=8),
        model=dict(mlp_dim=3328),
    )
