"""LRKV over a latent of 384, residuals of rank 48: 12 layers, width 768, 6 heads of 128.

A latent for all heads and low-rank residuals of each (LRKV, future work 5): attention/mla_lrkv.py.
Cached per token and layer: 1,024 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mla_lrkv_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 24,576 cache bytes per
token in bfloat16; 1.095 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 2,704 for 3,072.
Budget: 100B tokens in steps of 524,288: 109 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 109 exaFLOPs: at most 96.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_lrkv_wide_128m",
        scale="128m",
        attention=recipes.mla_lrkv(6, latent=384, rank=48),
        model=dict(mlp_dim=2704),
    )
