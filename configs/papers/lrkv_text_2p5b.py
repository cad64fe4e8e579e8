"""LRKV of rank 64, by the text's recipe: 36 layers, width 2304, 18 heads of 128.

The paper's: what the LRKV paper (arXiv 2601.11471) says of its training in section 5 and appendix A
(cosine schedule, warmup, weight decay 0.1, betas 0.9 and 0.95), where its numbers match nanochat's
recipe, the plain file's. Left out: appendix A's batch of 16 rows of 2,048 tokens, with which the
stated budgets would take 3.1M and 1.5M steps instead of 190K.

    python -m kvjax.main --config=configs/papers/lrkv_text_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,435,973,120 parameters, 2,284,978,176 without the input embedding; 186,912 cache bytes
per token in bfloat16; 15.748 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 787 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.21 days for 787 exaFLOPs: at most 96.0% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_text_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=64), preset="paper_text"
    )
