"""Runs that go on from a trained model, on conversations."""

import ml_collections

from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import MIXTURE, PARENT
from kvjax.recipes.pretraining import pretrain
from kvjax.recipes.section import keys


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
    config.mixture = ml_collections.ConfigDict(keys(_MID_TRAINING))
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
    config.mixture = ml_collections.ConfigDict(keys(_CHAT))
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
EMBEDDED_CONVERSATIONS = keys(
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
