"""Thin keys: keys of 8 channels, values of 32: 4 layers, width 128, 4 heads of 32.

Thin keys (arXiv 2603.04427), trained from scratch: d_select = d/4.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/thin_keys_tiny.py

Size: 1,212,416 parameters, 950,272 without the input embedding; 1,280 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "thin_keys_tiny", scale="tiny", attention=recipes.thin_keys(4, key_dim=8, head_dim=32)
    )
