"""Keys of rank 8 in place of 32 channels: 4 layers, width 128, 4 heads of 32.

The result of converting a trained MHA with RoPE (thin keys, arXiv 2603.04427, section 2.3): latents
are cached, and keys are rotated when they are read. Here it is trained from scratch.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/factored_tiny.py

Size: 1,265,664 parameters, 1,003,520 without the input embedding; 1,344 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "factored_tiny",
        scale="tiny",
        attention=recipes.factored(4, kv_heads=4, latents=4, key_rank=8, head_dim=32),
    )
