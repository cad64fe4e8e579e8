"""MLRA-4 with four latents of 64 and a RoPE key of 64: 12 layers, width 768, 6 heads of 128.

Multi-head low-rank attention with four branches (MLRA-4, arXiv 2603.02188, section 3).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mlra4_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.944 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 3,232 for 3,072.
Budget: 100B tokens in steps of 524,288: 194 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.55 days for 194 exaFLOPs: at most 91.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mlra4_narrow_128m",
        scale="128m",
        attention=recipes.mlra(6, branches=4, latent=64),
        model=dict(mlp_dim=3232),
    )
