"""LRKV of rank 64, by the text's recipe: 12 layers, width 768, 6 heads of 128.

The paper's: what the LRKV paper (arXiv 2601.11471) says of its training in section 5 and appendix A
(cosine schedule, warmup, weight decay 0.1, betas 0.9 and 0.95), where its numbers match nanochat's
recipe, the plain file's. Left out: appendix A's batch of 16 rows of 2,048 tokens, with which the
stated budgets would take 3.1M and 1.5M steps instead of 190K.

    python -m kvjax.main --config=configs/papers/lrkv_text_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 182,059,008 parameters, 131,727,360 without the input embedding; 24,864 cache bytes
per token in bfloat16; 1.017 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 102 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.34 days for 102 exaFLOPs: at most 97.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "lrkv_text_128m", scale="128m", attention=recipes.lrkv(6, rank=64), preset="paper_text"
    )
