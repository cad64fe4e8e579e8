"""GQA with 2 KV heads: 4 layers, width 128, 4 heads of 32.

No paper has this model: it is the smallest on which all mechanisms are compared, trained on the
embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/gqa_tiny.py

Size: 1,245,184 parameters, 983,040 without the input embedding; 1,024 cache bytes
per token in bfloat16; 0.007 GFLOP per trained token.
Hardware: two CPU cores, 4.1M tokens in five to seven minutes.
Measured: see experiments/reports/lrkv.md.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gqa_tiny", scale="tiny", attention=recipes.gqa(4, kv_heads=2, head_dim=32)
    )
