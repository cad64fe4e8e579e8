"""MLA with a latent of 128 and a decoupled RoPE key of 64: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 4: its MLA has a latent of 128, where section 5
says 768 at this scale.

    python -m kvjax.main --config=configs/papers/mla_l128_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,345,730,048 parameters, 2,194,735,104 without the input embedding; 13,824 cache bytes
per token in bfloat16; 15.716 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 786 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.19 days for 786 exaFLOPs: at most 95.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_l128_2p5b", scale="2p5b", attention=recipes.mla(18, latent=128))
