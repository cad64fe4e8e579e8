"""Models of other papers, at the papers' sizes and by their recipes; the recipe of LRKV's text.

`*_300m`, `*_1p2b`: projection sharing (arXiv 2606.04032), on SlimPajama with GPT-2's tokenizer. The
paper's perplexities count padding, whose loss is near 0. Here documents are packed, and attention
stays within a document, so perplexities are of text alone, and higher. At 1.2B the authors' code
plans 8,477 steps (10B tokens). The paper reports 7,500 steps, where the schedule ends here. With
--config.train.num_steps=8477 --config.train.stop_after=7500 the learning rates are the code's:
10 % higher on average, and 0.14 of the peak at the end instead of 0.1.

`llama_*_125m`: thin keys (arXiv 2603.04427, section 3.6, LLaMA-style "125M"), on WikiText-103. The
paper's perplexities are per word, those here per BPE token: compare bits per byte. There are about
as many tokens here as words there.

`*_text_*`: the recipe of section 5 and appendix A of the LRKV paper (arXiv 2601.11471): cosine
schedule, warmup, weight decay 0.1, betas 0.9 and 0.95. (The paper's numbers match nanochat's recipe
instead, which the plain files have.) The batch is not appendix A's 16 rows of 2,048 tokens, with
which the stated budgets would take 3.1M and 1.5M steps instead of 190K.

`mla_l*`: MLA with the latents of the LRKV paper's Tables 3 and 4.
"""

from kvjax import recipes

# Projection sharing. By scale: query heads of 64 channels, and KV heads of its GQA.
HEADS = {"300m": (16, 4), "1p2b": (32, 8)}
# By name: tied projections, KV heads (None: as many as query heads), scales.
SHARING = {
    "qkv": ("none", None, ("300m", "1p2b")),
    "kv_tied": ("kv", None, ("300m", "1p2b")),
    "gqa": ("none", "gqa", ("300m", "1p2b")),
    "mqa": ("none", 1, ("300m", "1p2b")),
    "kv_tied_gqa": ("kv", "gqa", ("300m", "1p2b")),
    "kv_tied_mqa": ("kv", 1, ("300m", "1p2b")),
    "kv_tied_gqa8": ("kv", 8, ("300m",)),
    "qk_tied": ("qk", None, ("300m",)),
    "qkv_tied": ("qkv", None, ("300m",)),
}


def _sharing(scale, tie, kv_heads):
    heads, gqa_heads = HEADS[scale]
    kv_heads = gqa_heads if kv_heads == "gqa" else kv_heads
    attention = recipes.projection_sharing(heads, tie=tie, kv_heads=kv_heads, head_dim=64)
    return {"scale": scale, "attention": recipes.without_qk_norm(attention, bias=True)}


def _llama(key_dim):
    attention = recipes.thin_keys(12, key_dim=key_dim, head_dim=64)
    return {"scale": "125m", "attention": recipes.without_qk_norm(attention)}


VARIANTS = {
    f"{name}_{scale}": _sharing(scale, tie, kv_heads)
    for name, (tie, kv_heads, scales) in SHARING.items()
    for scale in scales
}
VARIANTS |= {f"llama_d{12 * key_dim}_125m": _llama(key_dim) for key_dim in (64, 16, 8, 4)}
VARIANTS |= {
    f"{name}_text_{scale}": {"scale": scale, "attention": attention, "preset": "paper_text"}
    for scale, heads in (("128m", 6), ("2p5b", 18))
    for name, attention in (("mha", recipes.mha(heads)), ("lrkv", recipes.lrkv(heads, rank=64)))
}
VARIANTS |= {
    f"mla_l{latent}_2p5b": {"scale": "2p5b", "attention": recipes.mla(18, latent=latent)}
    for latent in (384, 128)
}

_TABLE_4 = {
    "qkv": 5.11,
    "kv_tied": 5.27,
    "qk_tied": 5.36,
    "qkv_tied": 6.41,
    "gqa": 5.15,
    "mqa": 5.19,
    "kv_tied_gqa": 5.32,
    "kv_tied_mqa": 5.36,
    "kv_tied_gqa8": 5.32,
}
NOTES = {f"{name}_300m": f"Table 4: perplexity {x:.2f}." for name, x in _TABLE_4.items()}
NOTES["kv_tied_gqa8_300m"] += ' 8 KV heads, as the authors\' file of "Q-GQA-4" has.'
NOTES |= {
    f"{name}_1p2b": "Table 10 and Figure 11." for name in SHARING if f"{name}_1p2b" in VARIANTS
}
NOTES |= {
    f"llama_d{dim}_125m": f"Perplexity {x:.2f} per word."
    for dim, x in ((768, 22.80), (192, 23.77), (96, 24.45), (48, 25.30))
}
NOTES |= {
    "mla_l384_2p5b": "Table 3; section 5 has a latent of 768 at this scale.",
    "mla_l128_2p5b": "Table 4; section 5 has a latent of 768 at this scale.",
}


def get_config(variant):
    return recipes.pretrain(variant, **VARIANTS[variant])
