"""MFA-KR with 2 KV heads of 416, queries of rank 1536: 36 layers, width 2304, 10 heads of 416.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_kr_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,277,440 parameters, 2,444,282,496 without the input embedding; 59,904 cache bytes
per token in bfloat16; 18.683 GFLOP per trained token.
Matched: 2,595,277,440 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.002 %;
MLP of 9,136 for 9,216.
Budget: 50B tokens in steps of 262,144: 934 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.39 days for 934 exaFLOPs: at most 95.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_narrow_2p5b",
        scale="2p5b",
        attention=recipes.mfa_kr(10, query_rank=1536, kv_heads=2, dim=416),
        model=dict(mlp_dim=9136),
    )
