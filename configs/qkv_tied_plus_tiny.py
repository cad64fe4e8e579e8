"""(Q=K=V)+, with 2-D encodings of 12 channels on the logits: 4 layers, width 128, 4 heads of 32.

Projection sharing (arXiv 2606.04032), section 2.2; see qk_tied_plus_tiny.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/qkv_tied_plus_tiny.py

Size: 1,179,696 parameters, 917,552 without the input embedding; 1,024 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "qkv_tied_plus_tiny",
        scale="tiny",
        attention=recipes.projection_sharing(4, tie="qkv", channels=12, head_dim=32),
    )
