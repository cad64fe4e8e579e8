"""MLA of latent 384 and RoPE key 64, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3, whose MLA has a latent of 384: ARC-Easy 67.5,
ARC-Challenge 51.5, MMLU 41.9, GSM8K 10.8, HumanEval 12.8, the mean of the five 36.9.

    python -m kvjax.main --config=configs/mid/mla_l384_2p5b.py

Parent: runs/mla_l384_2p5b, what configs/papers/mla_l384_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,409,431,040 parameters, 2,258,436,096 without the input embedding; 32,256 cache bytes
per token in bfloat16; 16.099 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 5,908
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train(
        "mid/mla_l384_2p5b", scale="2p5b", attention=recipes.mla(18, latent=384)
    )
