"""LRKV of rank 64, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B": the mean of five evaluations 40.2.

    python -m kvjax.main --config=configs/mid/lrkv_6p3b.py

Parent: runs/lrkv_6p3b, what configs/lrkv_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 6,112,870,400 parameters, 5,903,155,200 without the input embedding; 350,600 cache bytes
per token in bfloat16; 39.351 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 14,442
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/lrkv_6p3b", scale="6p3b", attention=recipes.lrkv(25, rank=64))
