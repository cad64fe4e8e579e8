"""MFA with one KV head of 160, queries of rank 512: 12 layers, width 768, 8 heads of 160.

Multi-matrix factorization attention (MFA, arXiv 2412.19255).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,499,648 parameters, 135,168,000 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.188 GFLOP per trained token.
Matched: 185,499,648 parameters here, 185,597,952 in mha_128m, a difference of -0.053 %;
MLP of 3,120 for 3,072.
Budget: 100B tokens in steps of 524,288: 119 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.38 days for 119 exaFLOPs: at most 96.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_narrow_128m",
        scale="128m",
        attention=recipes.mfa(8, query_rank=512, dim=160),
        model=dict(mlp_dim=3120),
    )
