"""MHA: 4 layers, width 128, 4 heads of 32.

No paper has this model: it is the smallest on which all mechanisms are compared, trained on the
embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/mha_tiny.py

Size: 1,310,720 parameters, 1,048,576 without the input embedding; 2,048 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores, 4.1M tokens in five to seven minutes.
Measured: see experiments/reports/lrkv.md.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mha_tiny", scale="tiny", attention=recipes.mha(4, head_dim=32))
