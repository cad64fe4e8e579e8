"""What configs share: scales, mechanisms, presets. A config file picks from here and runs nothing.

config = recipes.pretrain("lrkv_128m", scale="128m", attention=recipes.lrkv(6, rank=64))
"""

import dataclasses
import json
import os

import ml_collections

from kvjax.attention import FactoredConfig
from kvjax.attention import GroupedConfig
from kvjax.attention import LatentConfig
from kvjax.attention import RebuiltLatentConfig
from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import MIXTURE
from kvjax.data.config import PARENT
from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.experiment import ComputeConfig
from kvjax.experiment import TrainConfig
from kvjax.foundation import runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.errors import first_line
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.optim import OptimizerConfig

HEAD_DIM = 128
VOCAB_SIZE = 65_536


def pretrain(name: str, *, scale: str, attention: dict, preset: str = "nanochat", **sections: dict):
    """The config of a run: a scale, a mechanism, an optimizer preset.

    Args:
      name: the file's name; the default workdir is runs/<name>.
      scale: "tiny", "128m" (d12), "2p5b" (d36) or "6p3b" (d50).
      attention: one of the mechanisms below.
      preset: "nanochat", or "paper_text", what the LRKV paper's text says instead.
      sections: keys in which the run differs from its scale: model=dict(mlp_dim=3264).

    Returns:
      A locked ml_collections.ConfigDict; `kvjax.experiment.resolve` reads it.
    """
    base = dict(
        name=name,
        model=_model(depth=4),
        attention=attention,
        optimizer=PRESETS[preset](),
        data=_keys(DataConfig()),
        train=_keys(TrainConfig(num_steps=500, batch_size=32)),
        compute=_keys(ComputeConfig()),
        mesh=_keys(MeshConfig()),
    )
    for section, values in (*SCALES[scale]().items(), *sections.items()):
        base[section].update(values)
    config = ml_collections.ConfigDict(base)
    config.lock()
    return config


def _keys(config) -> dict:
    """A section of a config from what it is read into: every key, with its default."""
    return dataclasses.asdict(config)


# -- scales: depth is the one dial -----------------------------------------------------------------


def _model(depth: int) -> dict:
    """A model of depth layers and width 64·depth; the rest is nanochat's."""
    width = 64 * depth
    return _keys(BlockConfig(num_layers=depth, d_model=width, mlp_dim=4 * width))


def tiny() -> dict:
    """Width 128, 4 layers, 1.3M parameters: minutes on two CPU cores."""
    model = dict(num_layers=4, d_model=128, mlp_dim=512)
    return dict(model=model, train=dict(num_steps=500, eval_every=100, checkpoint_every=100))


def _paper(depth: int, *, steps: int, tokens_per_step: int, accumulation: int) -> dict:
    """A scale of the LRKV paper: FineWeb-Edu, context 2048, vocabulary 65,536."""
    return dict(
        model=_model(depth),
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


# -- mechanisms ------------------------------------------------------------------------------------


def grouped(num_heads: int, *, kv_heads: int, bases: int, rank: int, dim: int = HEAD_DIM) -> dict:
    """N query heads, K KV heads, J bases, rank R, head dims H = Hv."""
    shape = dict(num_heads=num_heads, num_kv_heads=kv_heads, num_bases=bases, rank=rank)
    config = GroupedConfig(**shape, key_dim=dim, value_dim=dim)
    return dict(kind="grouped", layer_ranks=()) | _keys(config)


def mha(num_heads: int, *, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=num_heads, bases=num_heads, rank=0, dim=dim)


def gqa(num_heads: int, *, kv_heads: int, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=kv_heads, bases=kv_heads, rank=0, dim=dim)


def mqa(num_heads: int, *, dim: int = HEAD_DIM) -> dict:
    return gqa(num_heads, kv_heads=1, dim=dim)


def lrkv(num_heads: int, *, rank: int, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=num_heads, bases=1, rank=rank, dim=dim)


def thin_keys(
    num_heads: int, *, key_dim: int, kv_heads: int | None = None, dim: int = HEAD_DIM
) -> dict:
    """Keys (and queries) of fewer channels than values."""
    return gqa(num_heads, kv_heads=kv_heads or num_heads, dim=dim) | dict(key_dim=key_dim)


def projection_sharing(
    num_heads: int,
    *,
    tie: str,
    kv_heads: int | None = None,
    channels: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Q-K=V is tie="kv" (with kv_heads Q-GQA, Q-MQA), Q=K-V "qk", Q=K=V "qkv"; channels: "+"."""
    shape = gqa(num_heads, kv_heads=kv_heads or num_heads, dim=dim)
    return shape | dict(tie=tie, position_channels=channels)


def mla(num_heads: int, *, latent: int, rope_dim: int = HEAD_DIM // 2, dim: int = HEAD_DIM) -> dict:
    """Position from one key of rope_dim channels that is cached beside the latent."""
    shape = dict(num_heads=num_heads, latent_dim=latent, key_dim=dim, value_dim=dim)
    return dict(kind="mla") | _keys(LatentConfig(**shape, rope_key_dim=rope_dim))


def mla_paper(num_heads: int, *, latent: int, dim: int = HEAD_DIM) -> dict:
    """Every head's keys are rebuilt from the latent and rotated, as the LRKV paper counts MLA."""
    shape = dict(num_heads=num_heads, latent_dim=latent, key_dim=dim, value_dim=dim)
    return dict(kind="mla_paper") | _keys(RebuiltLatentConfig(**shape))


def factored(
    num_heads: int,
    *,
    kv_heads: int,
    latents: int,
    key_rank: int,
    value_rank: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Keys of low rank from J latents, of values too if they have a rank; no base."""
    shape = dict(num_heads=num_heads, num_kv_heads=kv_heads, num_latents=latents)
    shape |= dict(key_rank=key_rank, value_rank=value_rank)
    config = FactoredConfig(**shape, key_dim=dim, value_dim=dim)
    return dict(kind="factored", layer_ranks=()) | _keys(config)


# -- optimizer presets -----------------------------------------------------------------------------


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
    return _keys(OptimizerConfig())


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


PRESETS = {"nanochat": nanochat, "paper_text": paper_text, "tuning": tuning}


# -- conversations: a trained model goes on --------------------------------------------------------


def mid_train(name: str, *, scale: str, attention: dict, **sections: dict):
    """The config of a run that goes on from a pretrained one, on conversations.

    As karpathy/nanochat's mid_train (commit 0f00788), which the LRKV paper's Table 3 has: one pass
    over SmolTalk, MMLU and GSM8K, every target counts, the optimizer begins anew at the full rates
    of pretraining, constant and over the last fifth linear to 0, nothing clipped. Known
    differences: rows overlap by one token, where nanochat leaves out a target between batches;
    they are shuffled once more; and what `nanochat` above says.

    Args:
      name: the file's name, with its folder; the parent is runs/ and that of the file.
      scale, attention: of the parent, as in `pretrain`.
      sections: keys in which the run differs: train=dict(parent="runs/other@1000").
    """
    config = pretrain(name, scale=scale, attention=attention).unlock()
    rows = 524_288 // 2048
    # As many rows of a part as in pretraining.
    parts = rows * config.train.grad_accumulation // config.train.batch_size
    config.train.update(
        parent=f"runs/{name.rpartition('/')[2]}",
        num_steps=0,
        batch_size=rows,
        grad_accumulation=max(1, parts),
        eval_every=150,
        eval_rows=5120,  # 10.5M tokens
        checkpoint_every=150,
        keep_checkpoints=2,
        sample_tokens=0,  # a text that no conversation is
    )
    config.data.update(source=MIXTURE, tokenizer=PARENT, sequence_length=2048)
    config.optimizer.update(clip_norm=0.0)
    config.mixture = ml_collections.ConfigDict(_keys(_MID_TRAINING))
    for section, values in sections.items():
        config[section].update(values)
    return config.lock()


def chat_sft(name: str, *, scale: str, attention: dict, **sections: dict):
    """The config of a run that goes on from a mid-trained one: nanochat's chat_sft (same commit).

    20,843 conversations, one a row, of which only what the assistant says counts, 32 a step; all
    rates times 0.02, linear to 0; Muon's momentum 0.95. nanochat divides each part's loss by the
    part's own targets, here a step's is divided by all of its.

    Args:
      name: the file's name; the parent is runs/mid/ and that of the file.
      scale, attention, sections: as in `mid_train`.
    """
    config = mid_train(name, scale=scale, attention=attention).unlock()
    config.train.update(
        parent=f"runs/mid/{name.rpartition('/')[2]}",
        batch_size=32,
        grad_accumulation=1,
        eval_every=100,
        eval_rows=0,
        checkpoint_every=100,
    )
    rates = dict(lr_scale=0.02, schedule="linear", momentum_warmup_steps=0)
    config.optimizer.update(rates)
    config.mixture = ml_collections.ConfigDict(_keys(_CHAT))
    for section, values in sections.items():
        config[section].update(values)
    return config.lock()


_MID_TRAINING = MixtureConfig(
    smoltalk="~/data/smol-smoltalk/data/train-*.parquet",
    mmlu="~/data/mmlu/auxiliary_train/train-*.parquet",
    gsm8k="~/data/gsm8k/main/train-*.parquet",
    validation_smoltalk="~/data/smol-smoltalk/data/test-*.parquet",
    validation_mmlu="~/data/mmlu/all/test-*.parquet#0:5200",
    validation_gsm8k="~/data/gsm8k/main/test-*.parquet#0:420",
)
# Made up, for a laptop; in the place of those that a recipe names.
EMBEDDED_CONVERSATIONS = _keys(
    MixtureConfig(conversations="embedded#0:450", validation_conversations="embedded#450:500")
)
_CHAT = MixtureConfig(
    arc="~/data/ai2_arc/ARC-Easy/train-*.parquet, ~/data/ai2_arc/ARC-Challenge/train-*.parquet",
    gsm8k=_MID_TRAINING.gsm8k,
    smoltalk=f"{_MID_TRAINING.smoltalk}#0:10000",
    validation_smoltalk=f"{_MID_TRAINING.validation_smoltalk}#0:1000",
    order=("arc", "gsm8k", "smoltalk", "mmlu", "conversations"),
    loss="assistant",
    pack="single",
)


# -- models that are there already -----------------------------------------------------------------

# What of attention is tuned after a conversion, by the names of parameters. Thin keys' Table 7 says
# "QK" of as many parameters as GPT-2's queries, keys and values have together: both are here.
TUNED = {
    "qk": ("mechanism.query", "key"),
    "qkv": ("mechanism.",),
    "attention": ("attention.",),
}


def imported(name: str, model: TransformerConfig, attention: dict, *, context: int):
    """The config of a workdir whose model was not trained here.

    Args:
      attention: the section that describes the model's mechanisms.
      context: tokens that it was trained on.
    """
    config = dict(
        name=name,
        model=_keys(model.block),
        attention=attention,
        optimizer=tuning(),
        data=_keys(
            DataConfig(
                tokenizer="tokenizer.json", vocab_size=model.vocab_size, sequence_length=context
            )
        ),
        train=_keys(TrainConfig(num_steps=1, batch_size=1)),
        compute=_keys(ComputeConfig()),
        mesh=_keys(MeshConfig()),
    )
    return ml_collections.ConfigDict(config).lock()


def recover(parent: str | os.PathLike, *, tune: str = "qk", teacher: str = "", **sections: dict):
    """The config of a run that tunes what a conversion made, as in thin keys, section 3.7.

    3 epochs over 10M tokens there; here as many steps as `train` says.

    The backward pass computes attention again: on CPU SmolLM2-135M takes a third of the memory
    (5.1 GB instead of 15.7, 4 rows of 512 tokens) and no longer.

    Args:
      parent: the workdir of the converted model.
      tune: a key of TUNED.
      teacher: the workdir of the model before conversion, to learn from; "": the text alone.
      sections: keys in which the run differs: train=dict(num_steps=100).

    Raises:
      UserError: no workdir, or another key.
    """
    one_of("tune", tune, tuple(TUNED))
    parent = runtime.path("parent", parent)
    try:
        there = json.loads((parent / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"parent = {str(parent)!r}: is no workdir of a model ({first_line(error)}): "
            "`python -m kvjax.convert` makes one"
        ) from error
    lacking = [name for name in ("model", "attention", "data") if name not in there]
    if lacking:
        raise UserError(
            f"parent = {str(parent)!r}: is no workdir of a model (config.json has no "
            f"{lacking[0]!r}): `python -m kvjax.convert` makes one"
        )
    vocabulary = dict(
        tokenizer=str(parent / "tokenizer.json"), vocab_size=there["data"]["vocab_size"]
    )
    train = TrainConfig(num_steps=3_662, batch_size=8, grad_accumulation=8)  # 3 · 10M tokens
    config = dict(
        name=f"{parent.name}_tuned",
        model=there["model"],
        attention=there["attention"],
        optimizer=tuning() | dict(tuned=TUNED[tune]),
        data=_keys(DataConfig()) | vocabulary | dict(sequence_length=2048),
        train=_keys(train) | dict(parent=str(parent), teacher=str(teacher)),
        compute=_keys(ComputeConfig(remat="attention")),
        mesh=_keys(MeshConfig()),
    )
    for section, values in sections.items():
        one_of("section", section, tuple(name for name in config if name != "name"))
        config[section].update(values)
    return ml_collections.ConfigDict(config).lock()
