"""LRKV of rank 5: 12 layers, width 768, 6 heads of 128.

LRKV (arXiv 2601.11471) of a rank that makes its cache as small as MLA's.
Cached per token and layer: 316 elements beside the 320 of mla_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/lrkv_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,653,248 parameters, 135,321,600 without the input embedding; 7,872 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
Matched: 185,653,248 parameters here, 185,597,952 in mha_128m, a difference of +0.030 %;
MLP of 3,680 for 3,072.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_narrow_128m",
        scale="128m",
        attention=recipes.lrkv(6, rank=5),
        model=dict(mlp_dim=3680),
    )
