"""LRKV over a latent of 16, residuals of rank 4: 4 layers, width 128, 4 heads of 32.

A latent for all heads and low-rank residuals of each (LRKV, future work 5): attention/mla_lrkv.py.
Cached per token and layer: 64 elements beside the 64 of mla_tiny; parameters as MHA, by the width
of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/mla_lrkv_narrow_tiny.py

Parameters: 1,310,720 parameters, 1,048,576 without the input embedding; 512 cache bytes per token
in bfloat16; 0.008 GFLOP per trained token.
Matched: 1,310,720 parameters here, 1,310,720 in mha_tiny, a difference of +0.000 %;
MLP of 556 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_lrkv_narrow_tiny",
        scale="tiny",
        attention=recipes.mla_lrkv(4, latent=16, rank=4, rope_dim=16, dim=32),
        model=dict(mlp_dim=556),
    )
