"""GQA with 6 KV heads, rows of 131,072 tokens: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471, section 7) leaves contexts from 32K on to
future work. Stands beside lrkv_128k_2p5b. RoPE's base is 500,000: with 10,000 its
longest wave, 54,410 tokens, would turn more than twice.

    python -m kvjax.main --config=configs/long_context/gqa_128k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,340,421,632 parameters, 2,189,426,688 without the input embedding; 110,592 cache bytes
per token in bfloat16; 143.596 GFLOP per trained token.
Rows: 2 of 131,072 tokens per step, each split over 8 chips.
Budget: 50B tokens in steps of 262,144: 7,180 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 7.06 days for 7,180 exaFLOPs: at most 87.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gqa_128k_2p5b",
        scale="2p5b",
        attention=recipes.gqa(18, kv_heads=6),
        data=dict(sequence_length=131_072),
        train=dict(batch_size=2, eval_rows=80),
        model=dict(rope_base=500_000.0),
        mesh=dict(sequence=8),
    )
