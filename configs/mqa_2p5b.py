"""MQA: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.729.

    python -m kvjax.main --config=configs/mqa_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,234,253,312 parameters, 2,083,258,368 without the input embedding; 18,432 cache bytes
per token in bfloat16; 14.538 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 727 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.11 days for 727 exaFLOPs: at most 95.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mqa_2p5b", scale="2p5b", attention=recipes.mqa(18))
