"""TPA, KV-only, of ranks 1 and 1: 4 layers, width 128, 4 heads of 32.

Tensor product attention with dense queries (TPA KV-only, arXiv 2501.06425, section 3).
Cached per token and layer: 72 elements beside the 64 of mla_tiny; parameters as MHA, by the width
of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/tpa_kv_only_narrow_tiny.py

Parameters: 1,310,720 parameters, 1,048,576 without the input embedding; 576 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Matched: 1,310,720 parameters here, 1,310,720 in mha_tiny, a difference of +0.000 %;
MLP of 604 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_kv_only_narrow_tiny",
        scale="tiny",
        attention=recipes.tpa(4, query_factors=0, key_rank=1, value_rank=1, dim=32),
        model=dict(mlp_dim=604),
    )
