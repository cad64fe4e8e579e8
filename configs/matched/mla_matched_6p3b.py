"""MLA with a latent of 1024, parameters as MHA: 50 layers, width 3200, 25 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/mla_matched_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 6,563,430,400 parameters, 6,353,715,200 without the input embedding; 108,800 cache bytes
per token in bfloat16; 43.037 GFLOP per trained token.
Matched: 6,563,430,400 parameters here, 6,563,430,400 in mha_6p3b, a difference of 0;
MLP of 13,632 for 12,800.
Budget: 50B tokens in steps of 524,288: 2,152 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 3.30 days for 2,152 exaFLOPs: at most 96.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_matched_6p3b",
        scale="6p3b",
        attention=recipes.mla(25, latent=1024),
        model=dict(mlp_dim=13632),
    )
