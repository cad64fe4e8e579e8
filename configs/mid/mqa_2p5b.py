"""MQA, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: ARC-Easy 65.2, ARC-Challenge 47.3, MMLU
40.2, GSM8K 10.3, HumanEval 3.7, the mean of the five 33.3.

    python -m kvjax.main --config=configs/mid/mqa_2p5b.py

Parent: runs/mqa_2p5b, what configs/mqa_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,234,253,312 parameters, 2,083,258,368 without the input embedding; 18,432 cache bytes
per token in bfloat16; 14.538 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 5,335
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mqa_2p5b", scale="2p5b", attention=recipes.mqa(18))
