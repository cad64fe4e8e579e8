"""LRKV over groups: 2 KV heads of rank 16 on one base: 4 layers, width 128, 4 heads of 32.

The LRKV paper names this as future work; with one base it caches 22 % of MHA at 18 heads.
Trained on the embedded corpus (Shakespeare and the King James Bible).

    python -m kvjax.main --config=configs/lrkv_gqa_tiny.py

Size: 1,253,376 parameters, 991,232 without the input embedding; 1,056 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores; a run is 4.1M tokens. Measured: nothing yet, except that it learns.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_gqa_tiny",
        scale="tiny",
        attention=recipes.grouped(4, kv_heads=2, bases=1, rank=16, head_dim=32),
    )
