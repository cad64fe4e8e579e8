"""LRKV of rank 0: 12 layers, width 768, 6 heads of 128.

No paper's figure: the end of the rank ablation that the LRKV blog post shows without its
numbers. Without a residual this is MQA, the model of mqa_128m.

    python -m kvjax.main --config=configs/ranks/lrkv_r0_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 173,801,472 parameters, 123,469,824 without the input embedding; 6,144 cache bytes
per token in bfloat16; 0.967 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 97 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.32 days for 97 exaFLOPs: at most 97.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r0_128m", scale="128m", attention=recipes.lrkv(6, rank=0))
