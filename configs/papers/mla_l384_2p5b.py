"""MLA with a latent of 384 and a decoupled RoPE key of 64: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: its MLA has a latent of 384, where section 5
says 768 at this scale.

    python -m kvjax.main --config=configs/papers/mla_l384_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,409,431,040 parameters, 2,258,436,096 without the input embedding; 32,256 cache bytes
per token in bfloat16; 16.099 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 805 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.22 days for 805 exaFLOPs: at most 95.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_l384_2p5b", scale="2p5b", attention=recipes.mla(18, latent=384))
