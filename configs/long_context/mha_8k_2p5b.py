"""MHA, rows of 8,192 tokens: 36 layers, width 2304, 18 heads of 128.

The paper's: the long-context comparison of the LRKV blog post, pretraining at 8K, shown without
its numbers; scale and budget are not stated there; those here are ours.

    python -m kvjax.main --config=configs/long_context/mha_8k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 331,776 cache bytes
per token in bfloat16; 22.819 GFLOP per trained token.
Rows: 32 of 8,192 tokens per step, none of them split.
Budget: 50B tokens in steps of 262,144: 1,141 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.57 days for 1,141 exaFLOPs: at most 94.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mha_8k_2p5b",
        scale="2p5b",
        attention=recipes.mha(18),
        data=dict(sequence_length=8_192),
        train=dict(batch_size=32, eval_rows=1280),
    )
