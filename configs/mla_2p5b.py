"""MLA with a latent of 768 and a decoupled RoPE key of 64: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.724.

    python -m kvjax.main --config=configs/mla_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,504,982,528 parameters, 2,353,987,584 without the input embedding; 59,904 cache bytes
per token in bfloat16; 16.672 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 834 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.27 days for 834 exaFLOPs: at most 95.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_2p5b", scale="2p5b", attention=recipes.mla(18, latent=768))
