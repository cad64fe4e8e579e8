"""MLA with a latent of 768 and no RoPE key: 36 layers, width 2304, 18 heads of 128.

LRKV paper (arXiv 2601.11471), MLA of Table 2 and Figure 2: test BPB 0.724. As counted there,
the cache is 16.7 % of MHA's: keys are rebuilt from the latent, normed and rotated. mla_2p5b
also has MLA's RoPE key.

    python -m kvjax.main --config=configs/mla_paper_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,404,122,624 parameters, 2,253,127,680 without the input embedding; 55,296 cache bytes
per token in bfloat16; 15.557 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 778 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.19 days for 778 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_paper_2p5b", scale="2p5b", attention=recipes.mla_paper(18, latent=768)
    )
