"""LRKV of rank 64, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: ARC-Easy 70.7, ARC-Challenge 53.8, MMLU
42.2, GSM8K 11.3, HumanEval 11.7, the mean of the five 37.9.

    python -m kvjax.main --config=configs/mid/lrkv_2p5b.py

Parent: runs/lrkv_2p5b, what configs/lrkv_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,435,973,120 parameters, 2,284,978,176 without the input embedding; 186,912 cache bytes
per token in bfloat16; 15.748 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 5,780
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/lrkv_2p5b", scale="2p5b", attention=recipes.lrkv(18, rank=64))
