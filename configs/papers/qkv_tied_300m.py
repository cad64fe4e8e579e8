"""Q=K=V: 20 layers, width 1024, 16 heads of 64.

The paper's: projection sharing (arXiv 2606.04032), Table 4: validation perplexity 6.41.
That perplexity counts padding, which costs next to nothing; here documents are packed and none
sees another, so figures are of the text alone, and higher.

    python -m kvjax.main --config=configs/papers/qkv_tied_300m.py

Data: SlimPajama as JSON lines in ~/data/slimpajama, GPT-2's tokenizer (config.data.tokenizer).
Parameters: 263,550,976 parameters, 209,942,528 without the input embedding; 40,960 cache bytes
per token in bfloat16; 2.071 GFLOP per trained token.
Budget: 10B tokens in steps of 2,359,296: 21 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.07 days for 21 exaFLOPs: at most 97.6% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    attention = recipes.projection_sharing(16, tie="qkv", dim=64)
    return recipes.pretrain(
        "qkv_tied_300m", scale="300m", attention=recipes.without_qk_norm(attention, bias=True)
    )
