"""Optimizer sections: what a recipe says of learning rates, Muon, AdamW and the schedule."""

from kvjax.optim import OptimizerConfig
from kvjax.recipes.section import keys


def nanochat() -> dict:
    """karpathy/nanochat, commit 0f00788 (2025-10-19).

    Known differences of a run with this preset from nanochat's own:

    - weights, embedding included, are float32 and cast when used (nanochat keeps the embedding in
      bfloat16, and its RoPE tables); logits are soft-capped in float32, not bfloat16;
    - keys rotate by +t·theta, not -t·theta, and are normed before, not after (the same function);
    - RMSNorm adds 1e-6, not the dtype's epsilon;
    - Newton-Schulz runs in the compute dtype (bfloat16 in nanochat);
    - rows are shuffled anew each epoch; nanochat reads its shards in order;
    - validation counts whole rows of the held-out documents, not a fixed number of batches.
    """
    return keys(OptimizerConfig())


def paper_text() -> dict:
    """What LRKV section 5 and appendix A say: cosine with warmup, decay 0.1, betas (0.9, 0.95).

    The length of the warmup is not given; 1,000 steps is our choice.
    """
    return nanochat() | dict(
        adam_b1=0.9,
        adam_b2=0.95,
        matrix_weight_decay=0.1,
        adam_weight_decay=0.1,
        schedule="cosine",
        warmup_steps=1_000,
    )


def tuning() -> dict:
    """Thin keys, section 3.7: a learning rate of 5e-5; the rest is AdamW as PyTorch has it.

    The paper does not name its optimizer, schedule or weight decay.
    """
    rates = dict.fromkeys(("matrix", "embedding", "head", "vector"), 5e-5)
    return nanochat() | dict(
        matrices="adamw",
        **{f"{group}_learning_rate": rate for group, rate in rates.items()},
        adam_b1=0.9,
        adam_b2=0.999,
        adam_epsilon=1e-8,
        matrix_weight_decay=0.01,
        adam_weight_decay=0.01,
        cooldown_fraction=0.0,
    )


def adamw(rate: float, d_model: int, *, weight_decay: float, **keys) -> dict:
    """AdamW with one learning rate and one weight decay for all weights, cosine after a warmup.

    Args:
      d_model: D: the optimizer scales two rates by (D/768)^-1/2, which is taken back here.
      keys: of `OptimizerConfig`.
    """
    scaled = rate * (d_model / 768) ** 0.5
    found = dict(
        matrices="adamw",
        matrix_learning_rate=rate,
        vector_learning_rate=rate,
        embedding_learning_rate=scaled,
        head_learning_rate=scaled,
        matrix_weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        adam_b1=0.9,
        adam_b2=0.999,
        adam_epsilon=1e-8,
        schedule="cosine",
    )
    return found | keys


PRESETS = {"nanochat": nanochat, "paper_text": paper_text, "tuning": tuning}
