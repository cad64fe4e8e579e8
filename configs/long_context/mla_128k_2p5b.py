"""MLA with a latent of 768, rows of 131,072 tokens: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471, section 7) leaves contexts from 32K on to
future work. Stands beside lrkv_128k_2p5b. RoPE's base is 500,000: with 10,000 its
longest wave, 54,410 tokens, would turn more than twice. Rematerialises all but attention: with
"dots" it takes 107.5 % of the memory.

    python -m kvjax.main --config=configs/long_context/mla_128k_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,504,982,528 parameters, 2,353,987,584 without the input embedding; 59,904 cache bytes
per token in bfloat16; 177.198 GFLOP per trained token.
Rows: 2 of 131,072 tokens per step, each split over 8 chips.
Budget: 50B tokens in steps of 262,144: 8,860 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 9.08 days for 8,860 exaFLOPs: at most 83.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_128k_2p5b",
        scale="2p5b",
        attention=recipes.mla(18, latent=768),
        data=dict(sequence_length=131_072),
        train=dict(batch_size=2, eval_rows=80),
        model=dict(rope_base=500_000.0),
        compute=dict(remat="attention"),
        mesh=dict(sequence=8),
    )
