"""LRKV of rank 16: 36 layers, width 2304, 18 heads of 128.

LRKV (arXiv 2601.11471) of a rank that makes its cache as small as MLA's.
Cached per token and layer: 832 elements beside the 832 of mla_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/lrkv_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 62,496 cache bytes
per token in bfloat16; 16.704 GFLOP per trained token.
Matched: 2,595,225,600 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.000 %;
MLP of 11,088 for 9,216.
Budget: 50B tokens in steps of 262,144: 835 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.29 days for 835 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_narrow_2p5b",
        scale="2p5b",
        attention=recipes.lrkv(18, rank=16),
        model=dict(mlp_dim=11088),
    )
