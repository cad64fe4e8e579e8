"""MLA with a latent of 48 and a decoupled RoPE key of 16: 4 layers, width 128, 4 heads of 32.

No paper has this model: it is the smallest on which all mechanisms are compared, trained on the
embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/mla_tiny.py

Size: 1,294,336 parameters, 1,032,192 without the input embedding; 512 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores, 4.1M tokens in five to seven minutes.
Measured: see experiments/reports/lrkv.md.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_tiny", scale="tiny", attention=recipes.mla(4, latent=48, rope_dim=16, head_dim=32)
    )
