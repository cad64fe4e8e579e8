"""MFA with 2 KV heads of 256, queries of rank 512: 12 layers, width 768, 6 heads of 256.

Multi-matrix factorization attention (MFA, arXiv 2412.19255).
Cached per token and layer: 1,024 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 24,576 cache bytes
per token in bfloat16; 1.265 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 2,560 for 3,072.
Budget: 100B tokens in steps of 524,288: 126 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.40 days for 126 exaFLOPs: at most 96.3% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_wide_128m",
        scale="128m",
        attention=recipes.mfa(6, query_rank=512, kv_heads=2),
        model=dict(mlp_dim=2560),
    )
