"""GQA with 6 KV heads, on conversations: 36 layers, width 2304, 18 heads of 128.

The paper's: LRKV (arXiv 2601.11471), Table 3: ARC-Easy 65.4, ARC-Challenge 49.6, MMLU
40.5, GSM8K 10.0, HumanEval 13.4, the mean of the five 35.8.

    python -m kvjax.main --config=configs/mid/gqa_2p5b.py

Parent: runs/gqa_2p5b, what configs/gqa_2p5b.py trains (config.train.parent).
Data: smol-smoltalk, MMLU and GSM8K as Parquet files in ~/data (config.mixture).
Parameters: 2,340,421,632 parameters, 2,189,426,688 without the input embedding; 110,592 cache bytes
per token in bfloat16; 15.175 GFLOP per trained token.
One pass over 567,656 conversations, about 700 steps of 524,288 tokens: about 5,569
petaFLOPs.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train("mid/gqa_2p5b", scale="2p5b", attention=recipes.gqa(18, kv_heads=6))
