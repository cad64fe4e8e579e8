"""MLA of latent 768 and RoPE key 64, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: ARC-Easy 67.5, ARC-Challenge 51.5, MMLU
41.9, GSM8K 10.8, HumanEval 12.8, the mean of the five 36.9.

    python -m kvjax.main --config=configs/mid/mla_2p5b.py

Parent: runs/mla_2p5b, what configs/mla_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,504,982,528 parameters, 2,353,987,584 without the input embedding; 59,904 cache bytes
per token in bfloat16; 16.672 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 6,119
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mla_2p5b", scale="2p5b", attention=recipes.mla(18, latent=768))
