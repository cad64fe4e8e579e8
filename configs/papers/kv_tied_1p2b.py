"""Q-K=V: 22 layers, width 2048, 32 heads of 64.

Reproduces: projection sharing (arXiv 2606.04032), Table 10 and Figure 11. It planned 8,477 steps
and reports 7,500 of them.
Its perplexity counts padding, which costs next to nothing; here documents are packed and none
sees another, so figures are of the text alone, and higher.

    python -m kvjax.main --config=configs/papers/kv_tied_1p2b.py

Data: SlimPajama as JSON lines in ~/data/slimpajama, GPT-2's tokenizer (config.data.tokenizer).
Parameters: 1,122,783,232 parameters, 1,015,566,336 without the input embedding; 90,112 cache bytes
per token in bfloat16; 7.816 GFLOP per trained token.
Budget: 10B tokens in steps of 1,179,648: 78 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 0.12 days for 78 exaFLOPs: at most 98.2% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    attention = recipes.projection_sharing(32, tie="kv", dim=64)
    return recipes.pretrain(
        "kv_tied_1p2b", scale="1p2b", attention=recipes.plain(attention, bias=True)
    )
