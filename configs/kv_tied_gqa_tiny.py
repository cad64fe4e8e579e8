"""Q-GQA: Q-K=V with 2 KV heads: 4 layers, width 128, 4 heads of 32.

Projection sharing (arXiv 2606.04032), section 2.3: a quarter of MHA's cache here.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/kv_tied_gqa_tiny.py

Size: 1,212,416 parameters, 950,272 without the input embedding; 512 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "kv_tied_gqa_tiny",
        scale="tiny",
        attention=recipes.projection_sharing(4, tie="kv", kv_heads=2, head_dim=32),
    )
