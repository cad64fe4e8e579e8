"""MHA, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B", beside which the mean of LRKV is 40.2.

    python -m kvjax.main --config=configs/mid/mha_6p3b.py

Parent: runs/mha_6p3b, what configs/mha_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 6,563,430,400 parameters, 6,353,715,200 without the input embedding; 640,000 cache bytes
per token in bfloat16; 42.054 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 15,434
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mha_6p3b", scale="6p3b", attention=recipes.mha(25))
