"""GQA with 6 KV heads: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), Table 2 and Figure 2: test BPB 0.725.

    python -m kvjax.main --config=configs/gqa_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,340,421,632 parameters, 2,189,426,688 without the input embedding; 110,592 cache bytes
per token in bfloat16; 15.175 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 759 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.16 days for 759 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("gqa_2p5b", scale="2p5b", attention=recipes.gqa(18, kv_heads=6))
