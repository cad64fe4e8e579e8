"""GTA with 2 KV heads of 24: 4 layers, width 128, 4 heads of 24.

Grouped-tied attention (Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).
Cached per token and layer: 64 elements beside the 64 of mla_tiny; parameters as MHA, by the width
of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/gta_narrow_tiny.py

Parameters: 1,310,720 parameters, 1,048,576 without the input embedding; 512 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Matched: 1,310,720 parameters here, 1,310,720 in mha_tiny, a difference of +0.000 %;
MLP of 640 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gta_narrow_tiny",
        scale="tiny",
        attention=recipes.gta(4, kv_heads=2, dim=24, rope_dim=16),
        model=dict(mlp_dim=640),
    )
