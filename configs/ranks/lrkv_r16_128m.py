"""LRKV of rank 16: 12 layers, width 768, 6 heads of 128.

The paper's: LRKV (arXiv 2601.11471), section 6.3, Table 5 and Figure 9, r = 16: test BPB
0.881.

    python -m kvjax.main --config=configs/ranks/lrkv_r16_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 175,865,856 parameters, 125,534,208 without the input embedding; 11,040 cache bytes
per token in bfloat16; 0.980 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 98 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.33 days for 98 exaFLOPs: at most 97.5% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_r16_128m", scale="128m", attention=recipes.lrkv(6, rank=16))
