"""GQA with 6 KV heads, rows of 32,768 tokens: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471, section 7) leaves contexts from 32K on to
future work. Stands beside lrkv_32k_2p5b.

    python -m kvjax.main --config=configs/long_context/gqa_32k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,340,421,632 parameters, 2,189,426,688 without the input embedding; 110,592 cache bytes
per token in bfloat16; 45.751 GFLOP per trained token.
Rows: 8 of 32,768 tokens per step, each split over 2 chips.
Budget: 50B tokens in steps of 262,144: 2,288 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 2.57 days for 2,288 exaFLOPs: at most 90.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gqa_32k_2p5b",
        scale="2p5b",
        attention=recipes.gqa(18, kv_heads=6),
        data=dict(sequence_length=32_768),
        train=dict(batch_size=8, eval_rows=320),
        mesh=dict(sequence=2),
    )
