"""MHA, by the text's recipe: 12 layers, width 768, 6 heads of 128.

The paper's: what the LRKV paper (arXiv 2601.11471) says of its training in section 5 and appendix A
(cosine schedule, warmup, weight decay 0.1, betas 0.9 and 0.95), where its numbers match nanochat's
recipe, the plain file's. Left out: appendix A's batch of 16 rows of 2,048 tokens, with which the
stated budgets would take 3.1M and 1.5M steps instead of 190K.

    python -m kvjax.main --config=configs/papers/mha_text_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 36,864 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mha_text_128m", scale="128m", attention=recipes.mha(6), preset="paper_text"
    )
