"""LRKV of rank 42: 12 layers, width 768, 6 heads of 128.

No paper's figure: LRKV (arXiv 2601.11471) with the cache of GQA-3. Rank 64 caches what 4 KV
heads do; 4 does not divide 6, 3 does.

    python -m kvjax.main --config=configs/matched/lrkv_r42_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 179,220,480 parameters, 128,888,832 without the input embedding; 18,528 cache bytes
per token in bfloat16; 1.000 GFLOP per trained token.
Equal cache: 18,528 bytes per token here, 18,432 in gqa_128m, a difference of +0.5 %.
Budget: 100B tokens in steps of 524,288: 100 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.33 days for 100 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r42_128m", scale="128m", attention=recipes.lrkv(6, rank=42))
