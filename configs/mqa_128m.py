"""MQA: 12 layers, width 768, 6 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.886.

    python -m kvjax.main --config=configs/mqa_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 173,801,472 parameters, 123,469,824 without the input embedding; 6,144 cache bytes
per token in bfloat16; 0.967 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 97 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.32 days for 97 exaFLOPs: at most 97.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mqa_128m", scale="128m", attention=recipes.mqa(6))
