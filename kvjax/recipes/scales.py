"""Sizes of models, their data and budgets: depth is the one dial."""

from kvjax.model.config import BlockConfig
from kvjax.recipes.section import keys

VOCAB_SIZE = 65_536


def model(depth: int) -> dict:
    """A model of depth layers and width 64·depth; the rest is nanochat's."""
    width = 64 * depth
    return keys(BlockConfig(num_layers=depth, d_model=width, mlp_dim=4 * width))


def tiny() -> dict:
    """Width 128, 4 layers, 1.3M parameters: minutes on two CPU cores."""
    model = dict(num_layers=4, d_model=128, mlp_dim=512)
    return dict(model=model, train=dict(num_steps=500, eval_every=100, checkpoint_every=100))


def _paper(depth: int, *, steps: int, tokens_per_step: int, accumulation: int) -> dict:
    """A scale of the LRKV paper: FineWeb-Edu, context 2048, vocabulary 65,536."""
    return dict(
        model=model(depth),
        data=dict(
            source="~/data/fineweb-edu/*.parquet",
            validation_fraction=0.001,
            vocab_size=VOCAB_SIZE,
            sequence_length=2048,
            specials="chat",
        ),
        train=dict(
            num_steps=steps,
            batch_size=tokens_per_step // 2048,
            grad_accumulation=accumulation,
            eval_every=1000,
            eval_rows=5120,  # 10.5M tokens, as nanochat
            checkpoint_every=1000,
            keep_checkpoints=3,
        ),
        compute=dict(remat="dots"),
    )


SCALES = {
    "tiny": tiny,
    "128m": lambda: _paper(12, steps=190_735, tokens_per_step=524_288, accumulation=1),
    "2p5b": lambda: _paper(36, steps=190_735, tokens_per_step=262_144, accumulation=1),
    "6p3b": lambda: _paper(50, steps=95_367, tokens_per_step=524_288, accumulation=2),
}
