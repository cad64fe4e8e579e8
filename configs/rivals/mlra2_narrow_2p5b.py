"""MLRA-2 with four latents of 192 and a RoPE key of 64: 36 layers, width 2304, 18 heads of 128.

Multi-head low-rank attention with two branches (MLRA-2, arXiv 2603.02188, section 3).
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mlra2_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 59,904 cache bytes
per token in bfloat16; 19.761 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.000 %;
MLP of 10,144 for 9,216.
Budget: 50B tokens in steps of 262,144: 988 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.44 days for 988 exaFLOPs: at most 94.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mlra2_narrow_2p5b",
        scale="2p5b",
        attention=recipes.mlra(18, branches=2, latent=192),
        model=dict(mlp_dim=10144),
    )
