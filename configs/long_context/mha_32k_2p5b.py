"""MHA, rows of 32,768 tokens: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471, section 7) leaves contexts from 32K on to
future work. Stands beside lrkv_32k_2p5b.

    python -m kvjax.main --config=configs/long_context/mha_32k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 331,776 cache bytes
per token in bfloat16; 47.280 GFLOP per trained token.
Rows: 8 of 32,768 tokens per step, each split over 2 chips.
Budget: 50B tokens in steps of 262,144: 2,364 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 2.69 days for 2,364 exaFLOPs: at most 90.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mha_32k_2p5b",
        scale="2p5b",
        attention=recipes.mha(18),
        data=dict(sequence_length=32_768),
        train=dict(batch_size=8, eval_rows=320),
        mesh=dict(sequence=2),
    )
