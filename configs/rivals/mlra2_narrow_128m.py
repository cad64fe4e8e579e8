"""MLRA-2 with four latents of 64 and a RoPE key of 64: 12 layers, width 768, 6 heads of 128.

Multi-head low-rank attention with two branches (MLRA-2, arXiv 2603.02188, section 3).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mlra2_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.378 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 3,360 for 3,072.
Budget: 100B tokens in steps of 524,288: 138 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.43 days for 138 exaFLOPs: at most 94.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mlra2_narrow_128m",
        scale="128m",
        attention=recipes.mlra(6, branches=2, latent=64),
        model=dict(mlp_dim=3360),
    )
