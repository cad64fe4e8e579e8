"""GLA with two latents of 128 and a RoPE key of 64: 12 layers, width 768, 6 heads of 128.

Grouped latent attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/gla_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.095 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 3,360 for 3,072.
Budget: 100B tokens in steps of 524,288: 109 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 109 exaFLOPs: at most 96.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gla_narrow_128m",
        scale="128m",
        attention=recipes.gla(6, latents=2, latent=128),
        model=dict(mlp_dim=3360),
    )
