"""LRKV of rank 64: 12 layers, width 768, 6 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.875.

    python -m kvjax.main --config=configs/lrkv_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 182,059,008 parameters, 131,727,360 without the input embedding; 24,864 cache bytes
per token in bfloat16; 1.017 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 102 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.34 days for 102 exaFLOPs: at most 97.4% MFU without masked keys, bound by compute.
Measured: 319,461 tokens/s and 32.8% MFU on one H200: 32 rows, no remat, XLA's autotuner off.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_128m", scale="128m", attention=recipes.lrkv(6, rank=64))
