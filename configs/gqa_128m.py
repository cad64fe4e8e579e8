"""GQA with 3 KV heads: 12 layers, width 768, 6 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.883.

    python -m kvjax.main --config=configs/gqa_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 178,520,064 parameters, 128,188,416 without the input embedding; 18,432 cache bytes
per token in bfloat16; 0.996 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 100 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.33 days for 100 exaFLOPs: at most 97.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("gqa_128m", scale="128m", attention=recipes.gqa(6, kv_heads=3))
