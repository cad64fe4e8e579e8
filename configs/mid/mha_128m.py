"""MHA, on conversations: 12 layers, width 768, 6 heads of 128.

The paper's: the LRKV blog post at "128M", beside which the mean of LRKV is 18.9.

    python -m kvjax.main --config=configs/mid/mha_128m.py

Parent: runs/mha_128m, what configs/mha_128m.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 36,864 cache bytes
per token in bfloat16; 1.038 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 381
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/mha_128m", scale="128m", attention=recipes.mha(6))
