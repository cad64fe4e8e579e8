"""Thin keys of 16 channels, SwiGLU and RoPE: 12 layers, width 768, 12 heads of 64.

The paper's: thin keys (arXiv 2603.04427), section 3.6, LLaMA-style "125M": validation perplexity
23.77 by word. Here texts are encoded by BPE of as many tokens as the paper has words, so bits
per byte compare, and perplexities do not.

    python -m kvjax.main --config=configs/papers/llama_d192_125m.py

Data: WikiText-103 as Parquet shards in ~/data/wikitext-103 (config.data.source).
Parameters: 91,079,424 parameters, 74,337,024 without the input embedding; 23,040 cache bytes
per token in bfloat16; 0.582 GFLOP per trained token.
Budget: 516.1M tokens in steps of 32,768: 300 petaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.0012 days for 0.30 exaFLOPs: at most 92.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    attention = recipes.without_qk_norm(recipes.thin_keys(12, key_dim=16, dim=64))
    return recipes.pretrain("llama_d192_125m", scale="125m", attention=attention)
