"""MLA with a latent of 768, parameters as MHA: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/mla_matched_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 59,904 cache bytes
per token in bfloat16; 17.213 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of 0;
MLP of 9,760 for 9,216.
Budget: 50B tokens in steps of 262,144: 861 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.31 days for 861 exaFLOPs: at most 95.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_matched_2p5b",
        scale="2p5b",
        attention=recipes.mla(18, latent=768),
        model=dict(mlp_dim=9760),
    )
