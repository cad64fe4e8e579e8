"""LRKV of rank 64, rows of 8,192 tokens: 36 layers, width 2304, 18 heads of 128.

The paper's: the long-context comparison of the LRKV blog post, pretraining at 8K, shown without
its numbers; scale and budget are not stated there; those here are ours.

    python -m kvjax.main --config=configs/long_context/lrkv_8k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,435,973,120 parameters, 2,284,978,176 without the input embedding; 186,912 cache bytes
per token in bfloat16; 21.864 GFLOP per trained token.
Rows: 32 of 8,192 tokens per step, none of them split.
Budget: 50B tokens in steps of 262,144: 1,093 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.49 days for 1,093 exaFLOPs: at most 94.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_8k_2p5b",
        scale="2p5b",
        attention=recipes.lrkv(18, rank=64),
        data=dict(sequence_length=8_192),
        train=dict(batch_size=32, eval_rows=1280),
    )
