"""MLA with a latent of 256 and a decoupled RoPE key of 64: 12 layers, width 768, 6 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.876.

    python -m kvjax.main --config=configs/mla_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 182,648,832 parameters, 132,317,184 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.077 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 108 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 108 exaFLOPs: at most 96.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_128m", scale="128m", attention=recipes.mla(6, latent=256))
