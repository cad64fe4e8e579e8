"""GQA with 5 KV heads, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B", beside which the mean of LRKV is 40.2.

    python -m kvjax.main --config=configs/mid/gqa_6p3b.py

Parent: runs/gqa_6p3b, what configs/gqa_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 5,744,230,400 parameters, 5,534,515,200 without the input embedding; 128,000 cache bytes
per token in bfloat16; 37.139 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 13,630
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/gqa_6p3b", scale="6p3b", attention=recipes.gqa(25, kv_heads=5))
