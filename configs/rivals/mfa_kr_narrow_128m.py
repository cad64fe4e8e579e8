"""MFA-KR with 2 KV heads of 160, queries of rank 512: 12 layers, width 768, 6 heads of 160.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 320 elements beside the 320 of mla_128m; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_kr_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,612,160 parameters, 135,280,512 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.104 GFLOP per trained token.
Matched: 185,612,160 parameters here, 185,597,952 in mha_128m, a difference of +0.008 %;
MLP of 3,376 for 3,072.
Budget: 100B tokens in steps of 524,288: 110 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 110 exaFLOPs: at most 97.3% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_narrow_128m",
        scale="128m",
        attention=recipes.mfa_kr(6, query_rank=512, kv_heads=2, dim=160),
        model=dict(mlp_dim=3376),
    )
