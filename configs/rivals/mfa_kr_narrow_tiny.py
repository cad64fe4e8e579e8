"""MFA-KR with 2 KV heads of 32, queries of rank 96: 4 layers, width 128, 4 heads of 32.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 64 elements beside the 64 of mla_tiny; parameters as MHA, by the width
of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/mfa_kr_narrow_tiny.py

Parameters: 1,310,848 parameters, 1,048,704 without the input embedding; 512 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Matched: 1,310,848 parameters here, 1,310,720 in mha_tiny, a difference of +0.010 %;
MLP of 572 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_narrow_tiny",
        scale="tiny",
        attention=recipes.mfa_kr(4, query_rank=96, kv_heads=2, dim=32),
        model=dict(mlp_dim=572),
    )
