"""MLA of latent 256 and RoPE key 64, on conversations: 12 layers, width 768, 6 heads of 128.

The paper's: the LRKV blog post at "128M", beside which the mean of LRKV is 18.9.

    python -m kvjax.main --config=configs/mid/mla_128m.py

Parent: runs/mla_128m, what configs/mla_128m.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 182,648,832 parameters, 132,317,184 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.077 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 395
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mla_128m", scale="128m", attention=recipes.mla(6, latent=256))
