"""LRKV of rank 64, on conversations: 12 layers, width 768, 6 heads of 128.

The paper's: the LRKV blog post at "128M": the mean of five evaluations 18.9.

    python -m kvjax.main --config=configs/mid/lrkv_128m.py

Parent: runs/lrkv_128m, what configs/lrkv_128m.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 182,059,008 parameters, 131,727,360 without the input embedding; 24,864 cache bytes
per token in bfloat16; 1.017 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 373
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/lrkv_128m", scale="128m", attention=recipes.lrkv(6, rank=64))
