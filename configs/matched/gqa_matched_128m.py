"""GQA with 3 KV heads, parameters as MHA: 12 layers, width 768, 6 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/gqa_matched_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 18,432 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of 0;
MLP of 3,456 for 3,072.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "gqa_matched_128m",
        scale="128m",
        attention=recipes.gqa(6, kv_heads=3),
        model=dict(mlp_dim=3456),
    )
