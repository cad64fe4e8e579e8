"""GQA with 5 KV heads, parameters as MHA: 50 layers, width 3200, 25 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/gqa_matched_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 6,563,430,400 parameters, 6,353,715,200 without the input embedding; 128,000 cache bytes
per token in bfloat16; 42.054 GFLOP per trained token.
Matched: 6,563,430,400 parameters here, 6,563,430,400 in mha_6p3b, a difference of 0;
MLP of 15,360 for 12,800.
Budget: 50B tokens in steps of 524,288: 2,103 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.25 days for 2,103 exaFLOPs: at most 97.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gqa_matched_6p3b",
        scale="6p3b",
        attention=recipes.gqa(25, kv_heads=5),
        model=dict(mlp_dim=15360),
    )
