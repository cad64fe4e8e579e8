"""Configs of mid-training and supervised fine-tuning (SFT) on conversations."""

from dataclasses import asdict

import ml_collections

from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import MIXTURE, PARENT
from kvjax.recipes.pretraining import pretrain


def mid_train(name: str, *, scale: str, attention: dict, **sections: dict):
    """Returns the config of mid-training: a pretrained model is trained on conversations.

    Follows karpathy/nanochat's mid_train (commit 0f00788), used for the LRKV paper's Table 3. The
    run is one epoch of SmolTalk, MMLU and GSM8K, with the loss over all targets. The optimizer
    state is new. Learning rates are those of pretraining and fall linearly over the last fifth of
    the steps. Gradients are not clipped.

    Differs from nanochat as listed in `optimizers.nanochat`, and in the rows: they overlap by one
    token (nanochat omits the target between batches) and are shuffled once more.

    Args:
      name: "FOLDER/NAME" of the config file; the parent is runs/NAME.
      scale, attention: as in `pretrain`; must equal the parent's.
      sections: keys to change, by section, such as train=dict(parent="runs/other@1000").
    """
    config = pretrain(name, scale=scale, attention=attention).unlock()
    rows = 524_288 // 2048
    # Number of microbatches, each with as many rows as in pretraining.
    microbatches = rows * config.train.grad_accumulation // config.train.batch_size
    config.train.update(
        parent=f"runs/{name.rpartition('/')[2]}",
        num_steps=0,
        batch_size=rows,
        grad_accumulation=max(1, microbatches),
        eval_every=150,
        eval_rows=5120,  # 10.5M tokens
        checkpoint_every=150,
        keep_checkpoints=2,
        sample_tokens=0,  # the sample prompt is not a conversation
    )
    config.data.update(source=MIXTURE, tokenizer=PARENT, sequence_length=2048)
    config.optimizer.update(clip_norm=0.0)
    config.mixture = ml_collections.ConfigDict(asdict(_MID_TRAINING))
    for section, values in sections.items():
        config[section].update(values)
    return config.lock()


def chat_sft(name: str, *, scale: str, attention: dict, **sections: dict):
    """Returns the config of supervised fine-tuning, after nanochat's chat_sft (same commit).

    The run has 20,843 conversations, one per row, in steps of 32 rows, with the loss over the
    assistant's tokens. All learning rates are multiplied by 0.02 and fall linearly to 0. Muon's
    momentum is 0.95 throughout. Unlike nanochat, which divides the loss of each microbatch by the
    microbatch's number of targets, kvjax divides a step's loss by the step's number of targets.

    Args:
      name: "FOLDER/NAME" of the config file; the parent is runs/mid/NAME.
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
    config.optimizer.update(lr_scale=0.02, schedule="linear", momentum_warmup_steps=0)
    config.mixture = ml_collections.ConfigDict(asdict(_CHAT))
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
# Synthetic conversations in place of the data sets above, for training on a laptop.
EMBEDDED_CONVERSATIONS = asdict(
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
