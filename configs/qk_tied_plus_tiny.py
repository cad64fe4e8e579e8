"""(Q=K-V)+, with 2-D encodings of 12 channels on the logits: 4 layers, width 128, 4 heads of 32.

Projection sharing (arXiv 2606.04032), section 2.2. Under softmax the encodings are a temperature
and a bias per key position; decoding caches nothing for them.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/qk_tied_plus_tiny.py

Size: 1,245,232 parameters, 983,088 without the input embedding; 2,048 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "qk_tied_plus_tiny",
        scale="tiny",
        attention=recipes.projection_sharing(4, tie="qk", channels=12, head_dim=32),
    )
