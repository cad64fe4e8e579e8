"""MQA, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B", beside which the mean of LRKV is 40.2.

    python -m kvjax.main --config=configs/mid/mqa_6p3b.py

Parent: runs/mqa_6p3b, what configs/mqa_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 5,580,390,400 parameters, 5,370,675,200 without the input embedding; 25,600 cache bytes
per token in bfloat16; 36.156 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 13,269
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mqa_6p3b", scale="6p3b", attention=recipes.mqa(25))
