"""LRKV of rank 55: 36 layers, width 2304, 18 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) at 2.5B with 0.43 of the head dim, the most of the
ranks that the blog post recommends (its 48.4 % of MHA's cache at this scale would be r = 54.8).

    python -m kvjax.main --config=configs/ranks/lrkv_r55_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,407,606,272 parameters, 2,256,611,328 without the input embedding; 163,584 cache bytes
per token in bfloat16; 15.578 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 779 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.20 days for 779 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r55_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=55))
