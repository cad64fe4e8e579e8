"""LRKV of rank 16 with RoPE on the shared part only: 4 layers, width 128, 4 heads of 32.

Not the paper's model: unrotated queries score unrotated residuals, so decoding absorbs B into the
query once (LRKV eq. 3), not once per position.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/lrkv_shared_rope_tiny.py

Size: 1,294,336 parameters, 1,032,192 without the input embedding; 1,600 cache bytes
per token in bfloat16; 0.009 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_shared_rope_tiny",
        scale="tiny",
        attention=recipes.lrkv(4, rank=16, head_dim=32) | dict(rope="shared"),
    )
