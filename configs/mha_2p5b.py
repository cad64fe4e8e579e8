"""MHA: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.723.

    python -m kvjax.main --config=configs/mha_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 331,776 cache bytes
per token in bfloat16; 16.704 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 835 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
Also: v4:4x4x4 (64 chips, --config.mesh.data=4).
Also: v5e:8x8 (64 chips, --config.mesh.data=4).
Also: h200:8 (8 chips).
At least 1.29 days for 835 exaFLOPs: at most 95.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mha_2p5b", scale="2p5b", attention=recipes.mha(18))
