"""MLA with a latent of 768, rows of 8,192 tokens: 36 layers, width 2304, 18 heads of 128.

The paper's: the long-context comparison of the LRKV blog post, pretraining at 8K, shown without
its numbers; scale and budget are not stated there; those here are ours.

    python -m kvjax.main --config=configs/long_context/mla_8k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,504,982,528 parameters, 2,353,987,584 without the input embedding; 59,904 cache bytes
per token in bfloat16; 24.316 GFLOP per trained token.
Rows: 32 of 8,192 tokens per step, none of them split.
Budget: 50B tokens in steps of 262,144: 1,216 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.63 days for 1,216 exaFLOPs: at most 93.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_8k_2p5b",
        scale="2p5b",
        attention=recipes.mla(18, latent=768),
        data=dict(sequence_length=8_192),
        train=dict(batch_size=32, eval_rows=1280),
    )
