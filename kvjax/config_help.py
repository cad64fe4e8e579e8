"""The help of `python -m kvjax.main` below its options: keys, meanings, configs."""

import textwrap

from kvjax.attention import MECHANISMS
from kvjax.config import ComputeConfig, TrainConfig
from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import command_line, output
from kvjax.foundation.config_keys import Key, keys
from kvjax.model.config import BlockConfig
from kvjax.optim import OptimizerConfig

SECTIONS = {
    "train": TrainConfig,
    "data": DataConfig,
    "model": BlockConfig,
    "optimizer": OptimizerConfig,
    "compute": ComputeConfig,
    "mesh": MeshConfig,
    "mixture": MixtureConfig,
}


def text() -> str:
    """Lists all keys by section, the mechanisms' keys by kind, and the configs of the checkout."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += [f"keys of config.{section}:", *_table(keys(cls)), ""]
    for kind, cls in MECHANISMS.items():
        lines += [f"keys of config.attention with kind={kind!r}:", *_table(keys(cls)), ""]
    lines += [
        "config.attention.layer_ranks: one rank per layer, which replaces `rank`, or those of",
        "`key_rank` and `value_rank` that are positive; (): the same rank in all layers",
        "",
        "configs:",
    ]
    for name, summary in command_line.config_list().items():
        lines += textwrap.wrap(
            f"{name}: {summary}",
            output.width(),
            initial_indent="  ",
            subsequent_indent="    ",
        )
    return "\n".join(lines)


def _table(section: list[Key]) -> list[str]:
    return [
        line
        for key in section
        for line in textwrap.wrap(
            f"{key.name}{f' ({key.default})' if key.default else ''}: {key.meaning}",
            output.width(),
            initial_indent="  ",
            subsequent_indent="      ",
        )
    ]
