"""LRKV of rank 64, parameters as MHA: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/lrkv_matched_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 186,912 cache bytes
per token in bfloat16; 16.704 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of 0;
MLP of 10,176 for 9,216.
Budget: 50B tokens in steps of 262,144: 835 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.29 days for 835 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_matched_2p5b",
        scale="2p5b",
        attention=recipes.lrkv(18, rank=64),
        model=dict(mlp_dim=10176),
    )
