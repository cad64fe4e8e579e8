"""MLA of latent 1024 and RoPE key 64, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B", beside which the mean of LRKV is 40.2.

    python -m kvjax.main --config=configs/mid/mla_6p3b.py

Parent: runs/mla_6p3b, what configs/mla_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 6,297,190,400 parameters, 6,087,475,200 without the input embedding; 108,800 cache bytes
per token in bfloat16; 41.440 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 15,209
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mla_6p3b", scale="6p3b", attention=recipes.mla(25, latent=1024))
