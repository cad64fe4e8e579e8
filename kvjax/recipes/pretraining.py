"""Runs that start from nothing."""

import ml_collections

from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.experiment import ComputeConfig, TrainConfig
from kvjax.recipes.optimizers import PRESETS
from kvjax.recipes.scales import SCALES, model
from kvjax.recipes.section import keys


def pretrain(name: str, *, scale: str, attention: dict, preset: str = "nanochat", **sections: dict):
    """The config of a run: a scale, a mechanism, an optimizer preset.

    Args:
      name: the file's name; the default workdir is runs/<name>.
      scale: "tiny", "128m" (d12), "2p5b" (d36) or "6p3b" (d50); of other papers "300m", "1p2b" or
        "125m", whose optimizers are their own.
      attention: a section that `recipes.mechanisms` makes.
      preset: "nanochat", or "paper_text", what the LRKV paper's text says instead.
      sections: keys in which the run differs from its scale: model=dict(mlp_dim=3264).

    Returns:
      A locked ml_collections.ConfigDict; `kvjax.experiment.resolve` reads it.
    """
    base = dict(
        name=name,
        model=model(depth=4),
        attention=attention,
        optimizer=PRESETS[preset](),
        data=keys(DataConfig()),
        train=keys(TrainConfig(num_steps=500, batch_size=32)),
        compute=keys(ComputeConfig()),
        mesh=keys(MeshConfig()),
    )
    for section, values in (*SCALES[scale]().items(), *sections.items()):
        base[section].update(values)
    config = ml_collections.ConfigDict(base)
    config.lock()
    return config
