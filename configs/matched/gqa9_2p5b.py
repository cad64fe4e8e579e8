"""GQA with 9 KV heads: 36 layers, width 2304, 18 heads of 128.

No paper's figure: the rival of LRKV (arXiv 2601.11471) with as many bytes of cache. LRKV of
rank 64 caches what 10 KV heads do; 10 does not divide 18, 9 does, and rank 56 has its bytes.

    python -m kvjax.main --config=configs/matched/gqa9_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,404,122,624 parameters, 2,253,127,680 without the input embedding; 165,888 cache bytes
per token in bfloat16; 15.557 GFLOP per trained token.
Equal cache: 165,888 bytes per token here, 166,176 in lrkv_r56_2p5b, a difference of -0.2 %.
Budget: 50B tokens in steps of 262,144: 778 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.19 days for 778 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("gqa9_2p5b", scale="2p5b", attention=recipes.gqa(18, kv_heads=9))
