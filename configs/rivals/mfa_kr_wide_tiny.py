"""MFA-KR with 4 KV heads of 48, queries of rank 96: 4 layers, width 128, 4 heads of 48.

MFA with keys reused as values (MFA-KR, arXiv 2412.19255).
Cached per token and layer: 192 elements beside the 192 of lrkv_tiny; parameters as MHA, by the
width of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/mfa_kr_wide_tiny.py

Parameters: 1,309,888 parameters, 1,047,744 without the input embedding; 1,536 cache bytes
per token in bfloat16; 0.009 GFLOP per trained token.
Matched: 1,309,888 parameters here, 1,310,720 in mha_tiny, a difference of -0.063 %;
MLP of 446 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mfa_kr_wide_tiny",
        scale="tiny",
        attention=recipes.mfa_kr(4, query_rank=96, kv_heads=4, dim=48),
        model=dict(mlp_dim=446),
    )
