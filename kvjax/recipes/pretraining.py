"""Configs of runs that start from random weights."""

from dataclasses import asdict

import ml_collections

from kvjax.config import ComputeConfig, TrainConfig
from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.recipes.optimizers import PRESETS
from kvjax.recipes.scales import SCALES, model


def pretrain(name: str, *, scale: str, attention: dict, preset: str = "nanochat", **sections: dict):
    """Returns the config of a pretraining run from a scale, a mechanism and an optimizer preset.

    Args:
      name: name of the config file; the default workdir is runs/NAME.
      scale: "tiny", "128m" (d12), "2p5b" (d36) or "6p3b" (d50); or a scale of another paper with
        that paper's optimizer: "300m", "1p2b" or "125m".
      attention: a section from `recipes.mechanisms`.
      preset: a key of `optimizers.PRESETS`.
      sections: keys that replace the scale's, by section, such as model=dict(mlp_dim=3264).

    Returns:
      A locked ml_collections.ConfigDict; `kvjax.config.resolve` reads it.
    """
    base = dict(
        name=name,
        model=model(depth=4),
        attention=attention,
        optimizer=PRESETS[preset](),
        data=asdict(DataConfig()),
        train=asdict(TrainConfig(num_steps=500, batch_size=32)),
        compute=asdict(ComputeConfig()),
        mesh=asdict(MeshConfig()),
    )
    for section, values in (*SCALES[scale]().items(), *sections.items()):
        base[section].update(values)
    config = ml_collections.ConfigDict(base)
    config.lock()
    return config


def servable(name: str, *, scale: str, attention: dict, **sections: dict):
    """Returns the config of a pretraining run whose model vLLM and SGLang read as DeepSeek-V3.

    Unlike `pretrain`'s, the model has gains in its norms, a SwiGLU instead of an MLP, and neither a
    soft cap nor QK-norm: `kvjax.convert.export --format=deepseek` refuses others. A SwiGLU has as
    many parameters as an MLP of 3/2 its width.

    Args:
      name, scale, sections: as in `pretrain`.
      attention: a section of MLA, of GTA, of LRKV with one base and rope="shared", or of any
        mechanism that is linear in the input if model=dict(positions="none").
    """
    block = dict(norm_gain=True, activation="swiglu", logit_softcap=0.0)
    sections["model"] = block | sections.get("model", {})
    return pretrain(name, scale=scale, attention=attention | dict(qk_norm="none"), **sections)
