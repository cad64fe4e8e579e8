"""Grids of training runs: cells, seeds and the figures of finished runs.

A cell is a config file with overrides. Figures of finished runs are in the study's result
(`FinishedRuns`), so a study can resume without the runs' folders. `side_by_side` trains the runs.

A study refuses runs that other code trained: each run's folder names its config and has a digest of
the code (`code`).
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import json
import pathlib
import statistics

from etils import epath
from flax import traverse_util
import jax.numpy as jnp
import ml_collections

from experiments.studies import code as code_lib, finished_runs
from experiments.studies.options import estimated
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.data.config import is_prepared
from kvjax.foundation import json_text, provenance
from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically
from kvjax.foundation.intervals import difference, estimate
from kvjax.sweep import runs as runs_lib
from kvjax.workdir import identity

# Files in kvjax/ that determine a run's numbers.
_DECIDES = (
    *("attention", "data", "layers", "model", "recipes", "kernels/softmax_attention"),
    *("config.py", "optim.py", "training/program.py", "training/loop.py"),
)
ABOUT = "study.json"  # in a run's folder: config, code and machine that trained it
EVALUATIONS = 4  # per run, evenly spaced


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model and recipe, trained with several seeds.

    Attributes:
      overrides: keys of the config, such as "model.mlp_dim". A whole section replaces the config's
        section, and the keys in it that `Run.overrides` would set. `Run` sets steps, seed and
        checkpoint interval.
      against: name of the reference cell, which differences are from, seed by seed; "": none.
      before: name of the cell without a change that both this cell and `against` have; "": none.
        The effect of the change is this cell's difference minus the difference of `before`.
    """

    name: str
    config: pathlib.Path
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)
    against: str = ""
    before: str = ""


@dataclasses.dataclass(frozen=True)
class Run(runs_lib.Run):
    """A cell with a seed and a number of steps."""

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

    @property
    def arguments(self) -> list[str]:
        overrides = [f"--config.{key}={value}" for key, value in self.overrides.items()]
        return [f"--config={self.cell.config}", *overrides]

    @property
    def identity(self) -> str:
        """Digest of the config that a run must have been trained with.

        Ignores keys with default values, which may be newer than the run, and the location of
        prepared data; the data's digest is in the run's folder.
        """
        tree = identity.identity(self.config, jnp.dtype(self.config.compute.dtype))
        defaults = config_lib.defaults(self.config.attention.kind)
        keys = traverse_util.flatten_dict(tree, sep=".")
        if is_prepared(keys["data.source"]):
            keys["data.source"] = "prepared"
        changed = {k: v for k, v in keys.items() if k not in defaults or v != defaults[k]}
        text = json.dumps(changed | dict(steps=self.steps), sort_keys=True, default=str)
        return code_lib.digest(text)


@functools.cache
def code() -> dict[str, str]:
    """Returns digests of the code at the study's start; see `code_now`."""
    return code_now()


def code_now() -> dict[str, str]:
    """Returns digests of the files that determine a run's numbers."""
    return code_lib.code_of(PACKAGE / name for name in _DECIDES)


def matched(
    config: pathlib.Path, parameters: int, overrides: Mapping[str, object] | None = None
) -> dict[str, int]:
    """Returns the override of the MLP's width with which a config is nearest to `parameters`."""

    def count(config):
        return formulas.parameters(config_lib.resolve(config).model)["total"]

    plain, wider = load_config(config), load_config(config)
    for one in (plain, wider):
        one.update_from_flattened_dict(overrides or {})
    wider.model.mlp_dim += 1
    per_channel = count(wider) - count(plain)
    more = round((parameters - count(plain)) / per_channel)
    return {"model.mlp_dim": plain.model.mlp_dim + more}


# -- finished runs ---------------------------------------------------------------------------------


class FinishedRuns(finished_runs.FinishedRuns):
    """Finished runs of a study whose runs have workdirs; extends `finished_runs.FinishedRuns`."""

    def __init__(
        self,
        file: pathlib.Path,
        steps: int,
        *,
        mix: bool,
        fresh: bool,
        code_files: Iterable[pathlib.Path] = (),
    ):
        """Reads the result, if there is one.

        Args:
          code_files: further source files that determine a run's figures.
        """
        self._measures = code_lib.code_of(code_files)
        self.steps = steps
        super().__init__(file, dict(steps=steps), code() | self._measures, mix=mix, fresh=fresh)

    def of(self, run: Run) -> dict | None:
        """Returns a run's figures; None for a missing run or one with another config."""
        return self.found(run.cell.name, run.seed, run.identity)

    def by_cell(self, cells: Iterable[Cell]) -> dict[str, dict[int, dict]]:
        """Returns the figures of cells' runs by name and seed, without cells that have none."""
        by_name = {}
        for cell in cells:
            runs = {}
            for seed in sorted(self.runs.get(cell.name, ())):
                if figures := self.of(Run(cell, seed, self.steps)):
                    runs[seed] = figures
            if runs:
                by_name[cell.name] = runs
        return by_name

    def keep(self, run: Run, workdir: pathlib.Path, **figures) -> None:
        """Records a run's figures with code, data and machine from its folder.

        Raises:
          UserError: another seed of its cell, or its reference cell, was trained on other data.
        """
        origin = about(workdir)
        digests, _ = origin.pop("code"), origin.pop("identity")
        if others := self._data_of(run) - {"", origin["data"]}:
            raise UserError(
                f"was trained on other data ({origin['data'] or 'which it does not name'}) than "
                f"runs that it is compared with ({others.pop()}): give another --runs"
            )
        self.put(run.cell.name, run.seed, run.identity, digests | self._measures, origin, **figures)

    def _data_of(self, run: Run) -> set[str]:
        """Returns digests of the data of its cell's other seeds and of its reference cell."""
        cells = (run.cell.name, run.cell.against)
        digests = [
            figures.get("data", "")
            for cell in cells
            for seed, figures in self.runs.get(cell, {}).items()
            if (cell, seed) != (run.cell.name, run.seed)
        ]
        return set(digests)


def row(cell: Cell, finished: FinishedRuns, runs_by_cell: Mapping[str, Mapping[int, dict]]) -> dict:
    """Returns a cell's costs and bits per byte, and their difference from its reference's.

    Args:
      runs_by_cell: figures of runs by cell and seed (`FinishedRuns.by_cell`).
    """
    model, runs = Run(cell, 0, finished.steps).experiment.model, runs_by_cell[cell.name]
    speeds = [x for run in runs.values() if (x := run["tokens_per_second"])]
    bpb, reference = bits(runs_by_cell, cell.name), bits(runs_by_cell, cell.against)
    return dict(
        parameters=formulas.parameters(model)["total"],
        cache_bytes=formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)),
        seeds=sorted(runs),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        **estimated("bpb", estimate(list(bpb.values()))),
        **estimated("difference", difference(bpb, reference)),
    )


def bits(runs_by_cell: Mapping[str, Mapping[int, dict]], name: str) -> dict[int, float]:
    """Returns the bits per byte of a cell's runs by seed; {} without runs."""
    return {seed: run["bpb"] for seed, run in runs_by_cell.get(name, {}).items()}


def begin(run: Run, workdir: epath.Path) -> None:
    """Writes a run's code and machine into its folder, unless the folder has them."""
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / ABOUT).exists():
        made_by = {key: x for key, x in provenance.provenance().items() if key != "command"}
        about = dict(identity=run.identity, code=code(), made_by=made_by)
        write_atomically(workdir / ABOUT, json.dumps(about) + "\n")


def about(workdir: pathlib.Path) -> dict:
    """Returns the code, data and machine recorded in a run's folder."""
    recorded = json_text.read_object(epath.Path(workdir / ABOUT), "train the run anew")
    return recorded | dict(data=data_of(workdir))


def data_of(workdir: epath.PathLike) -> str:
    """Returns a digest of a run's training data; "" if its folder does not name the data."""
    file = epath.Path(workdir) / "dataset.json"
    return code_lib.digest(file.read_text()) if file.exists() else ""
