"""MHA, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: ARC-Easy 66.6, ARC-Challenge 47.1, MMLU
39.3, GSM8K 10.2, HumanEval 13.4, the mean of the five 35.3.

    python -m kvjax.main --config=configs/mid/mha_2p5b.py

Parent: runs/mha_2p5b, what configs/mha_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,595,225,600 parameters, 2,444,230,656 without the input embedding; 331,776 cache bytes
per token in bfloat16; 16.704 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 6,130
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mha_2p5b", scale="2p5b", attention=recipes.mha(18))
