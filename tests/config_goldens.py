"""Goldens of configs: defaults once, and each config as its difference from another one.

tests/goldens/configs.txt has blocks of `key = value` lines. `[defaults]` are the defaults of the
config dataclasses, with `attention(KIND).KEY` for each kind of mechanism. `[NAME] BASE` lists the
values in which config NAME differs from config BASE, or from `defaults`; a config has the keys of
its own kind only. A key that is added with a default adds a line to `[defaults]` alone.
"""

import dataclasses
import functools

import ml_collections

from kvjax.attention import MECHANISMS
from kvjax.config import ComputeConfig, TrainConfig
from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import DataConfig
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import configuration
from kvjax.foundation.checkout import ROOT
from kvjax.model.config import BlockConfig
from kvjax.optim import OptimizerConfig

FILE = ROOT / "tests" / "goldens" / "configs.txt"
DEFAULTS = "defaults"
_REQUIRED = "(required)"
_SECTIONS = {
    "compute": ComputeConfig,
    "data": DataConfig,
    "mesh": MeshConfig,
    "mixture": MixtureConfig,
    "model": BlockConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
}
_SECTIONS |= {f"attention({kind})": cls for kind, cls in sorted(MECHANISMS.items())}


def values(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns the values of a config as text, by dotted key, without its name."""
    lines = _parse(configuration.to_text(config).splitlines())
    del lines["name"]  # the name of the golden's block
    return lines


def defaults() -> dict[str, str]:
    """Returns the defaults of the config dataclasses as text; some fields have none."""
    return {
        f"{section}.{field.name}": _REQUIRED
        if field.default is dataclasses.MISSING
        else repr(field.default)
        for section, cls in _SECTIONS.items()
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name)
    }


@functools.cache
def read() -> dict[str, tuple[str, dict[str, str]]]:
    """Returns each block of the golden file: its base, and the values that differ from it."""
    blocks = {}
    for block in FILE.read_text().strip().split("\n\n"):
        head, *lines = block.splitlines()
        name, base = head.removeprefix("[").split("]")
        blocks[name] = base.strip(), _parse(lines)
    return blocks


def expected(name: str) -> dict[str, str]:
    """Returns the values of a config that its golden block and the blocks of its bases give."""
    blocks, changed = read(), {}
    while name != DEFAULTS:
        name, lines = blocks[name]
        changed = lines | changed
    return _defaults_of(changed, blocks[DEFAULTS][1]) | changed


def write(configs: dict[str, dict[str, str]]) -> None:
    """Writes the golden file.

    The base of a config is the earlier config with the same keys that differs in the fewest values.

    Args:
      configs: `values` of each config, by name.
    """
    blocks = [_block(DEFAULTS, "", defaults())]
    for name, config in configs.items():
        bases = {DEFAULTS: _defaults_of(config, defaults())}
        for other in configs:
            if other == name:
                break
            if configs[other].keys() == config.keys():
                bases[other] = configs[other]
        differences = {
            base: {key: value for key, value in config.items() if value != other.get(key)}
            for base, other in bases.items()
        }
        base = min(differences, key=lambda base: len(differences[base]))
        blocks.append(_block(name, base, differences[base]))
    FILE.write_text("\n\n".join(blocks) + "\n")


def _defaults_of(config: dict[str, str], pinned: dict[str, str]) -> dict[str, str]:
    """Returns the defaults of the keys that a config of this kind has."""
    attention = f"attention({config['attention.kind'].strip(chr(39))})."
    has_mixture = any(key.startswith("mixture.") for key in config)
    others = ("attention(",) if has_mixture else ("attention(", "mixture.")
    return {
        key.replace(attention, "attention."): value
        for key, value in pinned.items()
        if key.startswith(attention) or not key.startswith(others)
    }


def _parse(lines: list[str]) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in lines)


def _block(name: str, base: str, lines: dict[str, str]) -> str:
    return "\n".join([f"[{name}] {base}".rstrip(), *(f"{k} = {v}" for k, v in lines.items())])
