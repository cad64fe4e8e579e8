"""MQA: 22 layers, width 2048, 32 heads of 64.

Reproduces: projection sharing (arXiv 2606.04032), Table 10 and Figure 11. It planned 8,477 steps
and reports 7,500 of them.
Its perplexity counts padding, which costs next to nothing; here documents are packed and none
sees another, so figures are of the text alone, and higher.

    python -m kvjax.main --config=configs/papers/mqa_1p2b.py

Data: SlimPajama as JSON lines in ~/data/slimpajama, GPT-2's tokenizer (config.data.tokenizer).
Parameters: 1,036,233,472 parameters, 929,016,576 without the input embedding; 5,632 cache bytes
per token in bfloat16; 7.297 GFLOP per trained token.
Budget: 10B tokens in steps of 1,179,648: 73 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 0.11 days for 73 exaFLOPs: at most 98.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    attention = recipes.mqa(32, dim=64)
    return recipes.pretrain("mqa_1p2b", scale="1p2b", attention=recipes.plain(attention, bias=True))
