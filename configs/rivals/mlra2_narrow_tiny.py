"""MLRA-2 with four latents of 12 and a RoPE key of 16: 4 layers, width 128, 4 heads of 32.

Multi-head low-rank attention with two branches (MLRA-2, arXiv 2603.02188, section 3).
Cached per token and layer: 64 elements beside the 64 of mla_tiny; parameters as MHA, by the width
of the MLP.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/rivals/mlra2_narrow_tiny.py

Parameters: 1,310,720 parameters, 1,048,576 without the input embedding; 512 cache bytes
per token in bfloat16; 0.010 GFLOP per trained token.
Matched: 1,310,720 parameters here, 1,310,720 in mha_tiny, a difference of +0.000 %;
MLP of 552 for 512.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mlra2_narrow_tiny",
        scale="tiny",
        attention=recipes.mlra(4, branches=2, latent=12, rope_dim=16, dim=32),
        model=dict(mlp_dim=552),
    )
