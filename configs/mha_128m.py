"""MHA: 12 layers, width 768, 6 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.878.

    python -m kvjax.main --config=configs/mha_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 185,597,952 parameters, 135,266,304 without the input embedding; 36,864 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mha_128m", scale="128m", attention=recipes.mha(6))
