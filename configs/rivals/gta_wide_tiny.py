"""GTA with 4 KV heads of 42: 4 layers, width 128, 4 heads of 42.

Grouped-tied attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 190 elements beside the 192 of lrkv_tiny; parameters as MHA, by the
width of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/gta_wide_tiny.py

Parameters: 1,309,696 parameters, 1,047,552 without the input embedding; 1,520 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Matched: 1,309,696 parameters here, 1,310,720 in mha_tiny, a difference of -0.078 %;
MLP of 504 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gta_wide_tiny",
        scale="tiny",
        attention=recipes.gta(4, kv_heads=4, dim=42, rope_dim=22),
        model=dict(mlp_dim=504),
    )
