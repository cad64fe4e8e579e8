"""MLA with a latent of 1024 and no RoPE key: 50 layers, width 3200, 25 heads of 128.

MLA of the LRKV blog post at "6.3B". Its cache is counted as in the paper: keys are rebuilt from the
latent, normed and rotated. The post gives no latent or budget: those here are our choice.

    python -m kvjax.main --config=configs/mla_paper_6p3b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 6,030,950,400 parameters, 5,821,235,200 without the input embedding; 102,400 cache bytes
per token in bfloat16; 38.860 GFLOP per trained token.
Budget: 50B tokens in steps of 524,288: 1,943 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 2.99 days for 1,943 exaFLOPs: at most 97.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_paper_6p3b", scale="6p3b", attention=recipes.mla_paper(25, latent=1024)
    )
