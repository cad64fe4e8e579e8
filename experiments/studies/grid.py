"""Grids of training runs, as data: cells and seeds, and what a study keeps of them.

A cell is a config file and overrides. What a study keeps of its runs stands in its result (`Kept`),
so that it goes on where their folders are gone. `side_by_side` trains them.

Runs of other code are not mixed: a run belongs to the code that trained it (`code`) and to a
config, both of which its folder names.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import json
import pathlib

from etils import epath
from flax import traverse_util
import jax.numpy as jnp
import ml_collections

from experiments.studies import code as code_lib, kept as kept_lib
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.data.config import is_prepared
from kvjax.foundation import json_text, provenance
from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically
from kvjax.workdir import identity

# What decides a run's numbers, in kvjax/.
_DECIDES = (
    *("attention", "data", "layers", "model", "recipes", "kernels/softmax_attention"),
    *("config.py", "optim.py", "training/program.py", "training/loop.py"),
)
ABOUT = "study.json"  # in a run's folder: config, code and machine that trained it
EVALUATIONS = 4  # of a run, evenly spaced
GUESS = 60e9  # FLOP/s of a core, until a run has told


@dataclasses.dataclass(frozen=True)
class Cell:
    """What differs from run to run but for the seed.

    Attributes:
      overrides: keys of the config, as "model.mlp_dim"; a section as a whole replaces the config's,
        and what a run usually sets in it (`Run.overrides`). Steps, seed and when checkpoints are
        written are the run's.
      against: the cell that it is compared with, seed by seed; "": none.
      before: the cell of the same model without the change that this cell and `against` have; what
        the change does to the difference is the difference less that cell's own; "": none.
    """

    name: str
    config: pathlib.Path
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)
    against: str = ""
    before: str = ""


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
        usual = {"compute.dtype": "float32", "train.sample_tokens": 0}
        usual |= {"train.eval_every": max(1, self.steps // EVALUATIONS)}
        fixed = {"train.num_steps": self.steps, "train.seed": self.seed}
        return usual | dict(self.cell.overrides) | fixed | {"train.checkpoint_every": self.steps}

    @functools.cached_property
    def config(self) -> ml_collections.ConfigDict:
        config = load_config(self.cell.config)
        with config.unlocked():
            config.update_from_flattened_dict(self.overrides)
        return config

    @functools.cached_property
    def experiment(self) -> config_lib.Experiment:
        return config_lib.resolve(self.config)

    @property
    def flops(self) -> float:
        """FLOPs of the run's training, without its evaluations."""
        one = self.experiment
        each = formulas.training_flops_per_token(one.model, one.data.sequence_length)
        return each * one.tokens_per_step * self.steps

    @property
    def identity(self) -> str:
        """A digest of its config: what a run must have been trained with.

        Keys that have their defaults, and may be newer than the run, do not count; nor does where
        prepared data lies: what it is stands in the run's folder.
        """
        tree = identity.identity(self.config, jnp.dtype(self.config.compute.dtype))
        usual = config_lib.defaults(self.config.attention.kind)
        every = traverse_util.flatten_dict(tree, sep=".")
        if is_prepared(every["data.source"]):
            every["data.source"] = "prepared"
        own = {k: v for k, v in every.items() if k not in usual or v != usual[k]}
        return code_lib.digest(
            json.dumps(own | dict(steps=self.steps), sort_keys=True, default=str)
        )


@functools.cache
def code() -> dict[str, str]:
    """By file what it says, as it is when a study begins; see `code_now`."""
    return code_now()


def code_now() -> dict[str, str]:
    """By file what it says: what decides a run's numbers."""
    return code_lib.code_of(PACKAGE / name for name in _DECIDES)


def matched(config: pathlib.Path, parameters: int) -> dict[str, int]:
    """The override of the MLP's width that brings a config nearest to so many parameters."""
    count = lambda c: formulas.parameters(config_lib.resolve(c).model)["total"]
    plain, wider = load_config(config), load_config(config)
    wider.model.mlp_dim += 1
    each = count(wider) - count(plain)
    return {"model.mlp_dim": plain.model.mlp_dim + round((parameters - count(plain)) / each)}


# -- what is kept ----------------------------------------------------------------------------------


class Kept(kept_lib.Kept):
    """What a study keeps of runs that lie in folders of their own; see `kept.Kept`."""

    def __init__(
        self,
        file: pathlib.Path,
        steps: int,
        *,
        mix: bool,
        fresh: bool,
        places: Iterable[pathlib.Path] = (),
    ):
        """
        Args:
          places: files that decide what is measured of a run, beside those that decide the run.
        """
        self._measures = code_lib.code_of(places)
        super().__init__(file, dict(steps=steps), code() | self._measures, mix=mix, fresh=fresh)
        self._mix, self._fresh = mix, fresh

    def of(self, run: Run) -> dict | None:
        """What is kept of a run; None of one that is not there, or was of another config."""
        return self.found(run.cell.name, run.seed, run.identity)

    def keep(self, run: Run, workdir: pathlib.Path, **found) -> None:
        """Keeps what a run came to, and what its folder says of code, data and machine.

        Raises:
          UserError: it was trained on other data than another seed of its cell, or than what its
            cell is compared with.
        """
        made = about(workdir)
        code, _ = made.pop("code"), made.pop("identity")
        if others := self._data_of(run) - {"", made["data"]}:
            raise UserError(
                f"was trained on other data ({made['data'] or 'which it does not name'}) than runs "
                f"that it is compared with ({others.pop()}): give another --runs"
            )
        self.put(run.cell.name, run.seed, run.identity, code | self._measures, made, **found)

    def _data_of(self, run: Run) -> set[str]:
        """Digests of the data of its cell's other seeds, and of what it is compared with."""
        cells = (run.cell.name, run.cell.against)
        others = [
            kept.get("data", "")
            for cell in cells
            for seed, kept in self.runs.get(cell, {}).items()
            if (cell, seed) != (run.cell.name, run.seed)
        ]
        return set(others)

    def borrow(self, runs: Iterable[Run], files: Iterable[pathlib.Path]) -> list[str]:
        """Takes runs of the same config from other studies: of the same code, or any with --mix.

        Returns:
          The names of those that were taken: none where a new result is begun.
        """
        missing = {run.identity: run for run in runs if self.of(run) is None}
        others = []
        for file in files:
            if missing and not self._fresh and file.exists():
                other = json_text.read_object(epath.Path(file), "move it away")
                codes = other.get("codes", {})
                kept = [k for seeds in other.get("runs", {}).values() for k in seeds.values()]
                others += [(k, codes[k["code"]]) for k in kept if k.get("code") in codes]
        same = lambda kept: not code_lib.changed(kept[1], code() | self._measures)
        taken = []
        for kept, of in sorted(others, key=same, reverse=True):  # the same code comes first
            if (self._mix or same((kept, of))) and kept["identity"] in missing:
                run = missing[kept["identity"]]
                if self._data_of(run) - {"", kept.get("data", "")}:
                    continue  # of other data
                del missing[kept["identity"]]
                self.runs.setdefault(run.cell.name, {})[run.seed] = kept
                self.codes[kept["code"]] = of
                taken.append(run.name)
        return taken


def begin(run: Run, workdir: epath.Path) -> None:
    """Writes what code and machine train a run into its folder, unless that says it."""
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / ABOUT).exists():
        made = {key: x for key, x in provenance.provenance().items() if key != "command"}
        said = dict(identity=run.identity, code=code(), made_by=made)
        write_atomically(workdir / ABOUT, json.dumps(said) + "\n")


def about(workdir: pathlib.Path) -> dict:
    """What a run's folder says of its code, its data and the machine that trained it."""
    found = json_text.read_object(epath.Path(workdir / ABOUT), "train the run anew")
    return found | dict(data=data_of(workdir))


def data_of(workdir: epath.PathLike) -> str:
    """A digest of what a run was trained on; "" if its folder does not say."""
    file = epath.Path(workdir) / "dataset.json"
    return code_lib.digest(file.read_text()) if file.exists() else ""
