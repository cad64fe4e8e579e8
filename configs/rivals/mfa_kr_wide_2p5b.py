"""MFA-KR with 10 KV heads of 256, queries of rank 1536: 36 layers, width 2304, 20 heads of 256.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 2,560 elements beside the 2,560 of lrkv_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/mfa_kr_wide_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,594,055,168 parameters, 2,443,060,224 without the input embedding; 184,320 cache bytes
per token in bfloat16; 19.457 GFLOP per trained token.
Matched: 2,594,055,168 parameters here, 2,595,225,600 in mha_2p5b, a difference of -0.045 %;
MLP of 7,488 for 9,216.
Budget: 50B tokens in steps of 262,144: 973 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.42 days for 973 exaFLOPs: at most 95.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_wide_2p5b",
        scale="2p5b",
        attention=recipes.mfa_kr(20, query_rank=1536, kv_heads=10),
        model=dict(mlp_dim=7488),
    )
