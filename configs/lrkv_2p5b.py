"""LRKV of rank 64: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.719.

    python -m kvjax.main --config=configs/lrkv_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,435,973,120 parameters, 2,284,978,176 without the input embedding; 186,912 cache bytes
per token in bfloat16; 15.748 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 787 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
Also: v4:4x4x4 (64 chips, --config.mesh.data=4).
Also: v5e:8x8 (64 chips, --config.mesh.data=4).
Also: h200:8 (8 chips).
At least 1.21 days for 787 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=64))
