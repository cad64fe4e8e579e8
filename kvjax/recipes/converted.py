"""Configs of imported or converted models, and of their fine-tuning."""

from dataclasses import asdict
import json
import os

import ml_collections

from kvjax.config import ComputeConfig, TrainConfig
from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, first_line
from kvjax.model.config import TransformerConfig
from kvjax.recipes.optimizers import tuning

# Fine-tuning trains the parameters whose names contain one of these strings. Table 7 of thin keys
# says "QK" but counts GPT-2's query, key and value parameters, so its runs may have trained "qk" or
# "qkv".
TUNED = {
    "qk": ("query", "key"),
    "qkv": ("mechanism.",),
    "attention": ("attention.",),
}


def imported(name: str, model: TransformerConfig, attention: dict, *, context: int):
    """Returns the config of a workdir for a published or converted model.

    Args:
      attention: config section of the model's mechanisms.
      context: number of tokens in a row that the model was trained on.
    """
    config = dict(
        name=name,
        model=asdict(model.block),
        attention=attention,
        optimizer=tuning(),
        data=asdict(
            DataConfig(
                tokenizer="tokenizer.json", vocab_size=model.vocab_size, sequence_length=context
            )
        ),
        train=asdict(TrainConfig(num_steps=1, batch_size=1)),
        compute=asdict(ComputeConfig()),
        mesh=asdict(MeshConfig()),
    )
    return ml_collections.ConfigDict(config).lock()


def recover(parent: str | os.PathLike, *, tune: str = "qk", teacher: str = "", **sections: dict):
    """Returns the config of a run that fine-tunes a converted model (thin keys, section 3.7).

    The run has 3,662 steps of 8 rows: 60M tokens with rows of 2,048 tokens, the default, or the
    paper's 30M (3 epochs of 10M) with GPT-2's rows of 1,024. The backward pass recomputes
    attention: on CPU, SmolLM2-135M with 4 rows of 512 tokens then needs 5.1 GB instead of 15.7 GB,
    at the same speed.

    Args:
      parent: workdir of the converted model.
      tune: a key of TUNED.
      teacher: workdir of the model before conversion, for distillation; "": no teacher.
      sections: keys to change, by section, such as train=dict(num_steps=100).

    Raises:
      UserError: `parent` is not the workdir of a model, or `tune` or a section is unknown.
    """
    one_of("tune", tune, tuple(TUNED))
    parent = runtime.path("parent", parent)
    try:
        parent_config = json.loads((parent / "config.json").read_text())
        missing = [name for name in ("model", "attention", "data") if name not in parent_config]
        if missing:
            raise ValueError(f"config.json has no {missing[0]!r}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"parent = {str(parent)!r}: is no workdir of a model ({first_line(error)}): "
            "`python -m kvjax.convert` makes one"
        ) from error
    vocabulary = dict(
        tokenizer=str(parent / "tokenizer.json"), vocab_size=parent_config["data"]["vocab_size"]
    )
    train = TrainConfig(num_steps=3_662, batch_size=8, grad_accumulation=8)
    config = dict(
        name=f"{parent.name}_tuned",
        model=parent_config["model"],
        attention=parent_config["attention"],
        optimizer=tuning() | dict(tuned=TUNED[tune]),
        data=asdict(DataConfig()) | vocabulary | dict(sequence_length=2048),
        train=asdict(train) | dict(parent=str(parent), teacher=str(teacher)),
        compute=asdict(ComputeConfig(remat="attention")),
        mesh=asdict(MeshConfig()),
    )
    for section, values in sections.items():
        one_of("section", section, tuple(name for name in config if name != "name"))
        config[section].update(values)
    return ml_collections.ConfigDict(config).lock()
