"""MLA with a latent of 768, rows of 32,768 tokens: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471, section 7) leaves contexts from 32K on to
future work. Stands beside lrkv_32k_2p5b.

    python -m kvjax.main --config=configs/long_context/mla_32k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,504,982,528 parameters, 2,353,987,584 without the input embedding; 59,904 cache bytes
per token in bfloat16; 54.893 GFLOP per trained token.
Rows: 8 of 32,768 tokens per step, each split over 2 chips.
Budget: 50B tokens in steps of 262,144: 2,745 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.07 days for 2,745 exaFLOPs: at most 88.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_32k_2p5b",
        scale="2p5b",
        attention=recipes.mla(18, latent=768),
        data=dict(sequence_length=32_768),
        train=dict(batch_size=8, eval_rows=320),
        mesh=dict(sequence=2),
    )
