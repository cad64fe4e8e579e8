"""Optimizer sections of configs: learning rates, Muon, AdamW and the schedule."""

from dataclasses import asdict

from kvjax.optim import OptimizerConfig


def nanochat() -> dict:
    """Returns the optimizer of karpathy/nanochat, commit 0f00788 (2025-10-19).

    Known differences between a run with this preset and nanochat:

    - weights, including the embedding, are stored in float32 and cast before use (nanochat keeps
      the embedding and RoPE tables in bfloat16); logits are soft-capped in float32, not bfloat16;
    - RoPE rotates keys by +t·theta after the norm; nanochat rotates them by -t·theta before it (the
      same function);
    - RMSNorm adds 1e-6 instead of the dtype's epsilon;
    - Newton-Schulz runs in the compute dtype (bfloat16 in nanochat);
    - rows are reshuffled each epoch; nanochat reads its shards in order;
    - validation counts whole rows of the held-out documents, not a fixed number of batches.
    """
    return asdict(OptimizerConfig())


def paper_text() -> dict:
    """Returns the optimizer that the text of LRKV describes (section 5 and appendix A).

    Cosine schedule, weight decay 0.1, betas (0.9, 0.95). The paper does not give the length of the
    warmup; 1,000 steps is our choice.
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
    """Returns the optimizer of fine-tuning in thin keys' section 3.7: a constant rate of 5e-5.

    The paper does not name the optimizer, the schedule or the weight decay; this is AdamW with
    PyTorch's defaults.
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
    """Returns AdamW with a cosine schedule, one learning rate and one weight decay.

    Args:
      d_model: D, to undo the optimizer's factor (D/768)^-1/2 on embedding and head.
      keys: further keys of `OptimizerConfig`.
    """
    scaled = rate * (d_model / 768) ** 0.5
    section = dict(
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
    return section | keys


PRESETS = {"nanochat": nanochat, "paper_text": paper_text, "tuning": tuning}
