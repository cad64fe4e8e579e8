"""Models that were not trained here, and runs that tune what a conversion made."""

import json
import os

import ml_collections

from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.experiment import ComputeConfig, TrainConfig
from kvjax.foundation import runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, first_line
from kvjax.model.config import TransformerConfig
from kvjax.recipes.optimizers import tuning
from kvjax.recipes.section import keys

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
        model=keys(model.block),
        attention=attention,
        optimizer=tuning(),
        data=keys(
            DataConfig(
                tokenizer="tokenizer.json", vocab_size=model.vocab_size, sequence_length=context
            )
        ),
        train=keys(TrainConfig(num_steps=1, batch_size=1)),
        compute=keys(ComputeConfig()),
        mesh=keys(MeshConfig()),
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
    # 60M tokens in rows of 2,048, 30M in rows of 1,024
    train = TrainConfig(num_steps=3_662, batch_size=8, grad_accumulation=8)
    config = dict(
        name=f"{parent.name}_tuned",
        model=there["model"],
        attention=there["attention"],
        optimizer=tuning() | dict(tuned=TUNED[tune]),
        data=keys(DataConfig()) | vocabulary | dict(sequence_length=2048),
        train=keys(train) | dict(parent=str(parent), teacher=str(teacher)),
        compute=keys(ComputeConfig(remat="attention")),
        mesh=keys(MeshConfig()),
    )
    for section, values in sections.items():
        one_of("section", section, tuple(name for name in config if name != "name"))
        config[section].update(values)
    return ml_collections.ConfigDict(config).lock()
