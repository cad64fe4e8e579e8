"""Q-K=V, values are the keys before RoPE: 4 layers, width 128, 4 heads of 32.

Projection sharing (arXiv 2606.04032), eq. 3: half of MHA's cache.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/kv_tied_tiny.py

Size: 1,245,184 parameters, 983,040 without the input embedding; 1,024 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "kv_tied_tiny", scale="tiny", attention=recipes.projection_sharing(4, tie="kv", head_dim=32)
    )
