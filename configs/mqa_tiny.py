"""MQA: 4 layers, width 128, 4 heads of 32.

No paper has this model: it is the smallest on which all mechanisms are compared, trained on the
embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/mqa_tiny.py

Size: 1,212,416 parameters, 950,272 without the input embedding; 512 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores, 4.1M tokens in five to seven minutes.
Measured: see experiments/reports/lrkv.md.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mqa_tiny", scale="tiny", attention=recipes.mqa(4, head_dim=32))
