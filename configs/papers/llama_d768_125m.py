"""MHA, SwiGLU and RoPE: 12 layers, width 768, 12 heads of 64.

The paper's: thin keys (arXiv 2603.04427), section 3.6, LLaMA-style "125M": validation perplexity
22.80 by word. Here texts are encoded by BPE of as many tokens as the paper has words, so bits
per byte compare, and perplexities do not.

    python -m kvjax.main --config=configs/papers/llama_d768_125m.py

Data: WikiText-103 as Parquet shards in ~/data/wikitext-103 (config.data.source).
Parameters: 101,696,256 parameters, 84,953,856 without the input embedding; 36,864 cache bytes
per token in bfloat16; 0.667 GFLOP per trained token.
Budget: 516.1M tokens in steps of 32,768: 344 petaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.0013 days for 0.34 exaFLOPs: at most 91.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    attention = recipes.without_qk_norm(recipes.mha(12, dim=64))
    return recipes.pretrain("llama_d768_125m", scale="125m", attention=attention)
