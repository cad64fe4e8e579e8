"""MLA of latent 1024, no RoPE key, on conversations: 50 layers, width 3200, 25 heads of 128.

The paper's: the LRKV blog post at "6.3B", beside which the mean of LRKV is 40.2.
Counted as the paper does: no RoPE key.

    python -m kvjax.main --config=configs/mid/mla_paper_6p3b.py

Parent: runs/mla_paper_6p3b, what configs/mla_paper_6p3b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 6,030,950,400 parameters, 5,821,235,200 without the input embedding; 102,400 cache bytes
per token in bfloat16; 38.860 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 14,262
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train(
        "mid/mla_paper_6p3b", scale="6p3b", attention=recipes.mla_paper(25, latent=1024)
    )
