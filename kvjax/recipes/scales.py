"""Scales: model sizes, each with its data and training budget."""

from dataclasses import asdict

from kvjax.model.config import BlockConfig
from kvjax.recipes import optimizers

VOCAB_SIZE = 65_536


def model(depth: int) -> dict:
    """Returns a model section of nanochat's shape: width 64·depth, MLP of 4 times the width."""
    width = 64 * depth
    return asdict(BlockConfig(num_layers=depth, d_model=width, mlp_dim=4 * width))


def tiny() -> dict:
    """Returns a scale that trains in minutes on 2 CPU cores: 4 layers, width 128, 1.3M weights."""
    model = dict(num_layers=4, d_model=128, mlp_dim=512)
    return dict(model=model, train=dict(num_steps=500, eval_every=100, checkpoint_every=100))


def _paper(depth: int, *, steps: int, tokens_per_step: int, accumulation: int) -> dict:
    """Returns a scale of the LRKV paper: FineWeb-Edu, context 2048, vocabulary 65,536."""
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


def _conventional(layers: int, width: int, mlp_dim: int, **model) -> dict:
    """Returns a model section like GPT-2's and LLaMA's.

    Weights start from N(0, 0.02²), norms have gains, the head is tied, logits have no soft cap.
    """
    shape = dict(num_layers=layers, d_model=width, mlp_dim=mlp_dim, norm_gain=True)
    initialisation = dict(embedding_std=0.02, matrix_std=0.02, zero_outputs=False)
    head = dict(embedding_norm=False, logit_softcap=0.0, tied_head=True)
    return shape | initialisation | head | model


def _sharing(
    layers: int,
    width: int,
    *,
    rate: float,
    warmup: int,
    rows: int,
    accumulation: int,
    steps: int,
    eval_every: int,
) -> dict:
    """Returns a scale of projection sharing (arXiv 2606.04032, section 3.3, and its code).

    The model is GPT-2's with 2,048 learned positions. The optimizer is AdamW with weight decay on
    all weights. The authors pad each document to a row and count the padding in the loss; here
    documents are packed with a document mask.

    Args:
      rows: rows of 2,048 tokens per step.
      accumulation: microbatches per step.
      steps: steps of the run.
      eval_every: steps between evaluations, and between checkpoints.
    """
    options = dict(
        norm="layer",
        norm_bias=True,
        norm_epsilon=1e-5,
        bias=True,
        dropout=0.1,
        positions="learned",
        max_positions=2048,
        activation="gelu_exact",
    )
    decay = dict(warmup_steps=warmup, final_fraction=0.1, weight_decay=0.1)
    return dict(
        model=_conventional(layers, width, 4 * width, **options),
        optimizer=optimizers.adamw(rate, width, adam_b2=0.95, **decay),
        data=dict(
            source="~/data/slimpajama/*.jsonl.zst",
            validation_fraction=0.001,
            tokenizer="~/data/gpt2/tokenizer.json",
            vocab_size=50_304,
            sequence_length=2048,
        ),
        train=dict(
            num_steps=steps,
            batch_size=rows,
            grad_accumulation=accumulation,
            eval_every=eval_every,
            eval_rows=4_608,  # 9.4M tokens; the authors use 10M
            checkpoint_every=eval_every,
            keep_checkpoints=3,
            separate=True,
        ),
        compute=dict(remat="dots"),
    )


def _llama_125m() -> dict:
    """Returns thin keys' LLaMA-style scale (arXiv 2603.04427, section 3.6): WikiText-103, 5 epochs.

    The paper tokenizes by words; its parameter counts imply a vocabulary between 21,761 and 21,832.
    Here BPE learns 21,800 tokens, so that every text can be encoded.
    """
    options = dict(activation="swiglu", rope_base=10_000.0, norm_epsilon=1e-6)
    decay = dict(warmup_steps=2_000, final_fraction=0.1, weight_decay=0.1)
    return dict(
        model=_conventional(12, 768, 2048, **options),
        optimizer=optimizers.adamw(3e-4, 768, adam_b2=0.95, **decay),
        data=dict(
            source="~/data/wikitext-103/train-*.parquet",
            validation_source="~/data/wikitext-103/validation-*.parquet",
            vocab_size=21_800,
            sequence_length=512,
        ),
        train=dict(
            num_steps=15_750,
            batch_size=64,
            eval_every=750,
            checkpoint_every=750,
            keep_checkpoints=3,
        ),
        compute=dict(remat="dots"),
    )


SCALES = {
    "tiny": tiny,
    "128m": lambda: _paper(12, steps=190_735, tokens_per_step=524_288, accumulation=1),
    "2p5b": lambda: _paper(36, steps=190_735, tokens_per_step=262_144, accumulation=1),
    "6p3b": lambda: _paper(50, steps=95_367, tokens_per_step=524_288, accumulation=2),
    "300m": lambda: _sharing(
        20, 1024, rate=2e-4, warmup=500, rows=1152, accumulation=18, steps=4_238, eval_every=200
    ),
    "1p2b": lambda: _sharing(
        22, 2048, rate=6e-5, warmup=1_000, rows=576, accumulation=4, steps=7_500, eval_every=500
    ),
    "125m": _llama_125m,
}
