"""MLA of latent 256, no RoPE key, on conversations: 12 layers, width 768, 6 heads of 128.

The paper's: the LRKV blog post at "128M", beside which the mean of LRKV is 18.9.
Counted as the paper does: no RoPE key.

    python -m kvjax.main --config=configs/mid/mla_paper_128m.py

Parent: runs/mla_paper_128m, what configs/mla_paper_128m.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 178,520,064 parameters, 128,188,416 without the input embedding; 6,144 cache bytes
per token in bfloat16; 0.996 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 365
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train(
        "mid/mla_paper_128m", scale="128m", attention=recipes.mla_paper(6, latent=256)
    )
