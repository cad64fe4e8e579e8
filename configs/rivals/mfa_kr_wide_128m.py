"""MFA-KR with 4 KV heads of 256, queries of rank 512: 12 layers, width 768, 8 heads of 256.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 1,024 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_kr_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,699,328 parameters, 135,367,680 without the input embedding; 24,576 cache bytes
per token in bfloat16; 1.449 GFLOP per trained token.
Matched: 185,699,328 parameters here, 185,597,952 in mha_128m, a difference of +0.055 %;
MLP of 2,096 for 3,072.
Budget: 100B tokens in steps of 524,288: 145 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.44 days for 145 exaFLOPs: at most 95.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_wide_128m",
        scale="128m",
        attention=recipes.mfa_kr(8, query_rank=512, kv_heads=4),
        model=dict(mlp_dim=2096),
    )
