"""LRKV with a rank per layer: 8, 16, 16, 24: 4 layers, width 128, 4 heads of 32.

The LRKV paper names this as future work; the mean of the ranks is lrkv_tiny's rank.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/lrkv_ranks_tiny.py

Size: 1,294,336 parameters, 1,032,192 without the input embedding; 1,600 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_ranks_tiny",
        scale="tiny",
        attention=recipes.lrkv(4, rank=16, head_dim=32) | dict(layer_ranks=(8, 16, 16, 24)),
    )
