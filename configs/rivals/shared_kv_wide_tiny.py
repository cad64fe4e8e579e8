"""Shared KV with 4 KV heads of 48: 4 layers, width 128, 4 heads of 48.

One vector as key and value with VO-RoPE ("S2", Su, kexue.fm 10862).
Cached per token and layer: 192 elements beside the 192 of lrkv_tiny; parameters as MHA, by the
width of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/shared_kv_wide_tiny.py

Parameters: 1,310,720 parameters, 1,048,576 without the input embedding; 1,536 cache bytes
per token in bfloat16; 0.009 GFLOP per trained token.
Matched: 1,310,720 parameters here, 1,310,720 in mha_tiny, a difference of +0.000 %;
MLP of 480 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "shared_kv_wide_tiny",
        scale="tiny",
        attention=recipes.shared_kv(4, kv_heads=4, dim=48, rope_dim=16),
        model=dict(mlp_dim=480),
    )
