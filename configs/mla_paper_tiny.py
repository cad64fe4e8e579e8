"""MLA as the LRKV paper counts it: a latent of 48, no RoPE key: 4 layers, width 128, 4 heads of 32.

No paper has this model: it is the smallest on which all mechanisms are compared, trained on the
embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/mla_paper_tiny.py

Size: 1,253,376 parameters, 991,232 without the input embedding; 384 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores, 4.1M tokens in five to seven minutes.
Measured: see experiments/reports/lrkv.md.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_paper_tiny", scale="tiny", attention=recipes.mla_paper(4, latent=48, head_dim=32)
    )
