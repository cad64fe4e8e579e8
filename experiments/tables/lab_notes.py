"""Reads the target chips of the paper-scale configs from their docstrings (lab notes).

    Target: v5p:2x2x4 (16 chips).
    Also: v4:4x4x4 (64 chips, --config.mesh.data=4).
    Also: h200:8 (8 chips).

A target is a topology, its number of chips, and config overrides for it. A variant, one of several
configs in a file, has no docstring of its own: its target is the one of its scale in TARGETS.
"""

import ast
import dataclasses
import math
import pathlib
import re

import jax.numpy as jnp

from kvjax import config as config_lib
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.configuration import one_of, to_text
from kvjax.foundation.errors import UserError

# Order of configs in the tables: "" for those with a file of their own, then files of variants.
_FILE_ORDER = ("", "ranks", "matched", "long_context", "rivals", "papers", "serving")
TARGETS = {
    "125m": "v5e:4x4",
    "128m": "v5e:4x4",
    "300m": "v5e:4x4",
    "1p2b": "v5p:2x2x4",
    "2p5b": "v5p:2x2x4",
    "6p3b": "v5p:2x2x4",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A topology that a config is meant for, and the config with this target's overrides."""

    topology: str  # see `kvjax.hardware.topology`
    overrides: tuple[str, ...]  # as on the command line
    resolved: tuple[str, ...]  # the config after the overrides, one line per key
    experiment: Experiment

    @property
    def chips(self) -> int:
        return chips(self.topology)

    @property
    def mesh(self) -> dict[str, int]:
        """Chips along each axis."""
        return self.experiment.mesh.shape(self.chips)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabNote:
    """A config and its targets."""

    path: pathlib.Path  # FILE.py, or FILE.py:VARIANT
    targets: tuple[Target, ...]  # the first is the main one

    @property
    def experiment(self) -> Experiment:
        return self.targets[0].experiment

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def cache_bytes(self) -> int:
        """Bytes per token, all layers, in bfloat16."""
        return formulas.cache_bytes_per_token(self.experiment.model, jnp.dtype(jnp.bfloat16))


def read_all(configs: pathlib.Path = CONFIGS) -> list[LabNote]:
    """Returns the lab notes of all configs except tiny ones, in the order of `scaling_table`.

    Leaves out configs/mid.py: its models and chips are the pre-training configs'.

    Raises:
      UserError: see `read`.
    """
    return sorted(
        (
            read(path)
            for path in command_line.config_files(configs)
            if not command_line.config_label(path).endswith("_tiny") and path.stem != "mid"
        ),
        key=_order,
    )


def read(path: pathlib.Path) -> LabNote:
    """Returns the lab note of a config.

    Raises:
      UserError: the config cannot be resolved, or its docstring lacks a target.
    """
    if not path.is_file():  # a variant
        topology = TARGETS[command_line.config_label(path).rpartition("_")[2]]
        return LabNote(
            path=path, targets=(_target(path, f"{topology} ({chips(topology)} chips)."),)
        )
    doc = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    main, also = (re.findall(rf"^{label}: (.*)$", doc, re.M) for label in ("Target", "Also"))
    if len(main) != 1:
        raise UserError(
            f"{path}: its docstring needs one line like 'Target: v5p:2x2x4 (16 chips).'; lines of "
            "other targets start with 'Also: '"
        )
    return LabNote(path=path, targets=tuple(_target(path, text) for text in main + also))


def _target(path: pathlib.Path, text: str) -> Target:
    """Parses a target, such as "v4:4x4x4 (64 chips, --config.mesh.data=4)."."""
    parts = re.fullmatch(
        r"(\w+:\d+(?:x\d+)*) \((\d+) chips((?:, --config\.\S+=[^\s,]+)*)\)\.", text
    )
    if not parts or chips(parts[1]) != int(parts[2]):
        raise UserError(
            f"{path}: target {text!r}: must be like 'v5p:2x2x4 (16 chips).' or "
            "'v4:4x4x4 (64 chips, --config.mesh.data=4).'"
        )
    overrides = parts[3].split(", ")[1:]
    config = command_line.load_config(path, overrides)
    return Target(
        topology=parts[1],
        overrides=tuple(overrides),
        resolved=tuple(to_text(config).splitlines()),
        experiment=config_lib.resolve(config),
    )


def chips(topology: str) -> int:
    """Returns a topology's number of chips from its name: 16 for v5p:2x2x4, 8 for h200:8."""
    return math.prod(map(int, topology.partition(":")[2].split("x")))


def _order(note: LabNote) -> tuple:
    file = "" if note.path.is_file() else note.path.stem
    scale, scales = note.name.rpartition("_")[2], list(TARGETS)
    one_of(f"{note.path}: the end of config.name", scale, scales)
    length = note.experiment.data.sequence_length
    return _FILE_ORDER.index(file), scales.index(scale), length, -note.cache_bytes, note.name
