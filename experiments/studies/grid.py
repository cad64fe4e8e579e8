"""Grids of training runs, as data: cells and seeds, and what a study keeps of them.

A cell is a config file and overrides. What a study keeps of its runs stands in its result (`Kept`),
so that it goes on where their folders are gone. `side_by_side` trains them.

Runs of other code are not mixed: a run belongs to the code that trained it (`code`) and to a
config, both of which its folder names.
"""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
import os
import pathlib

from etils import epath
from flax import traverse_util
import jax.numpy as jnp
import ml_collections

from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.foundation import json_text
from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.workdir import identity

# What decides a run's numbers, in kvjax/.
_DECIDES = (
    *("attention", "data", "layers", "model", "recipes", "kernels/softmax_attention"),
    *("experiment.py", "optim.py", "training/program.py", "training/loop.py"),
)
ABOUT = "study.json"  # in a run's folder: config, code and machine that trained it
EVALUATIONS = 4  # of a run, evenly spaced


@dataclasses.dataclass(frozen=True)
class Cell:
    """What differs from run to run but for the seed.

    Attributes:
      overrides: keys of the config, as "model.mlp_dim".
    """

    name: str
    config: pathlib.Path
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """A cell with a seed, for so many steps."""

    cell: Cell
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}_seed{self.seed}_steps{self.steps}"

    @functools.cached_property
    def overrides(self) -> dict[str, object]:
        train = dict(num_steps=self.steps, checkpoint_every=self.steps, sample_tokens=0)
        train |= dict(eval_every=max(1, self.steps // EVALUATIONS), seed=self.seed)
        fixed = {"compute.dtype": "float32"} | {f"train.{key}": x for key, x in train.items()}
        return dict(self.cell.overrides) | fixed

    @functools.cached_property
    def config(self) -> ml_collections.ConfigDict:
        config = load_config(self.cell.config)
        with config.unlocked():
            config.update_from_flattened_dict(self.overrides)
        return config

    @functools.cached_property
    def experiment(self) -> experiment_lib.Experiment:
        return experiment_lib.resolve(self.config)

    @property
    def flops(self) -> float:
        """Of its training, evaluations apart."""
        one = self.experiment
        each = formulas.training_flops_per_token(one.model, one.data.sequence_length)
        return each * one.tokens_per_step * self.steps

    @property
    def identity(self) -> str:
        """Of its config: what a run must have been trained with.

        Keys that have their defaults, and may be newer than the run, do not count.
        """
        tree = identity.identity(self.config, jnp.dtype(self.config.compute.dtype))
        usual = experiment_lib.defaults(self.config.attention.kind)
        every = traverse_util.flatten_dict(tree, sep=".")
        own = {k: v for k, v in every.items() if k not in usual or v != usual[k]}
        return _digest(json.dumps(own | dict(steps=self.steps), sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def code() -> dict[str, str]:
    """By file what it says, as it is when a study begins; see `code_now`."""
    return code_now()


def code_now() -> dict[str, str]:
    """By file what it says, without its comments and docstrings: what decides a run's numbers."""
    places = [PACKAGE / name for name in _DECIDES]
    files = [f for p in places for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    return {str(file.relative_to(PACKAGE)): _digest(_bare(file.read_text())) for file in files}


def _bare(source: str) -> str:
    """A file without docstrings and comments, in one form."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def changed(before: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """Files that differ from those of another time."""
    now = code() if now is None else now
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def matched(config: pathlib.Path, parameters: int) -> dict[str, int]:
    """The override of the MLP's width that brings a config nearest to so many parameters."""
    count = lambda c: formulas.parameters(experiment_lib.resolve(c).model)["total"]
    plain, wider = load_config(config), load_config(config)
    wider.model.mlp_dim += 1
    each = count(wider) - count(plain)
    return {"model.mlp_dim": plain.model.mlp_dim + round((parameters - count(plain)) / each)}


# -- what is kept ----------------------------------------------------------------------------------


class Kept:
    """What a study keeps of its finished runs, in its result, by cell and seed.

    Attributes:
      runs: {cell: {seed: what is kept, with the config's identity, the code and who made it}}.
      codes: {digest: files}, of all runs.

    Raises:
      UserError: the result is damaged or of other steps; or its runs were trained by other code,
        and it is not said that they may be mixed.
    """

    def __init__(self, file: pathlib.Path, steps: int, *, mix: bool, fresh: bool):
        self.runs: dict[str, dict[int, dict]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        if fresh or not file.exists():
            return
        advice = "move it away, or give --fresh to begin a new result"
        found = json_text.read_object(epath.Path(file), advice)
        missing = [key for key in ("steps", "runs", "codes") if key not in found]
        shown = os.path.relpath(file)
        if missing:
            raise UserError(f"{shown} lacks {missing[0]!r}: {advice}")
        if found["steps"] != steps:
            raise UserError(
                f"--steps = {steps}: {shown} has runs of {found['steps']} steps; give that, or "
                "--fresh to begin a new result"
            )
        self.codes = found["codes"]
        files = sorted({name for one in self.codes.values() for name in changed(one)})
        if files and not mix:
            raise UserError(
                f"{shown} has runs of other code ({in_short(files)}): both are not mixed. --fresh "
                "with another --runs trains all anew, and --mix takes them as they are, where the "
                "change decides no number"
            )
        for name, seeds in found["runs"].items():
            self.runs[name] = {int(seed): kept for seed, kept in seeds.items()}

    def of(self, run: Run) -> dict | None:
        """What is kept of a run; None of one that is not there, or was of another config."""
        kept = self.runs.get(run.cell.name, {}).get(run.seed)
        return kept if kept and kept["identity"] == run.identity else None

    def keep(self, run: Run, workdir: pathlib.Path, **found) -> dict:
        """Keeps what a run came to, and what its folder says of code, data and machine."""
        made = about(workdir)
        digest = _digest(json.dumps(made["code"], sort_keys=True))
        self.codes[digest] = made.pop("code")
        kept = made | dict(identity=run.identity, code=digest) | found
        self.runs.setdefault(run.cell.name, {})[run.seed] = kept
        return kept

    def as_json(self) -> dict:
        return dict(codes=self.codes, runs=self.runs)


def about(workdir: pathlib.Path) -> dict:
    """What a run's folder says of its code, its data and the machine that trained it."""
    file, data = workdir / ABOUT, workdir / "dataset.json"
    found = json_text.read_object(epath.Path(file), "train the run anew")
    return found | dict(data=_digest(data.read_text()) if data.exists() else "")


def in_short(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
