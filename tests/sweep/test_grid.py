"""Grids: which runs they have, what they are called, and what is refused."""

import functools
import re

import pytest

from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.sweep import grid

_TINY = CONFIGS / "lrkv_tiny.py"


def _runs(*given, files=(_TINY,), fixed=(), seeds=1):
    return grid.runs(files, grid.axes(given), fixed, seeds)


def test_a_grid_has_every_combination_seed_by_seed():
    given = ("attention.rank=8,16", "config.optimizer.matrix_learning_rate=0.01,0.02")
    runs = _runs(*given, fixed=["--config.train.num_steps=7"], seeds=2)
    assert [run.name for run in runs] == [
        f"rank={rank}_matrix_learning_rate={rate}_seed={seed}"
        for seed in (0, 1)
        for rank in (8, 16)
        for rate in (0.01, 0.02)
    ]
    for run in runs:  # what kvjax.main reads from its arguments is what was checked here
        file, *overrides = run.arguments
        assert file == f"--config={_TINY}" and load_config(_TINY, overrides) == run.config
    last = runs[-1].config
    assert (last.attention.rank, last.train.seed, last.train.num_steps) == (16, 1, 7)
    assert last.optimizer.matrix_learning_rate == 0.02


def test_two_configs_of_one_name_are_refused(tmp_path):
    """Their runs would share a folder."""
    files = [tmp_path / folder / "same.py" for folder in "ab"]
    for file, rank in zip(files, (8, 16), strict=True):
        file.parent.mkdir()
        file.write_text(_TINY.read_text().replace("rank=16", f"rank={rank}"))
    with pytest.raises(UserError, match="two configs have the name same_seed=0: rename a file"):
        _runs(files=tuple(files))


def test_names_are_folders():
    none, one = _runs("optimizer.tuned=(),('wq',)", "model.mlp_dim=96")
    assert re.fullmatch(r"tuned=[0-9a-f]{6}_mlp_dim=96_seed=0", none.name)
    assert re.fullmatch(r"tuned=wq-[0-9a-f]{6}_mlp_dim=96_seed=0", one.name)
    both = _runs(files=(_TINY, CONFIGS / "mha_tiny.py"))
    assert [run.name for run in both] == ["lrkv_tiny_seed=0", "mha_tiny_seed=0"]
    alike = _runs("attention.num_heads=4", "model.num_layers=4", "attention.rank=8,8")
    assert [run.name for run in alike] == ["num_heads=4_num_layers=4_rank=8_seed=0"]
    assert grid._short(["train.x", "data.x", "data.y"]) == ["train.x", "data.x", "y"]
    assert list(grid._split("(8,16),(),a")) == ["(8,16)", "()", "a"]


@pytest.mark.parametrize(
    "make, said",
    [
        (functools.partial(_runs, "attention.rank"), "--set attention.rank: give KEY=VALUE"),
        (functools.partial(_runs, "=1"), "--set =1: give KEY=VALUE"),
        (functools.partial(_runs, "train.seed=1"), "--set train.seed=1: .*--seeds=N"),
        (functools.partial(_runs, "name=x"), "--set name=x: runs are named after"),
        (
            functools.partial(_runs, fixed=["--config.train.seed=1"]),
            "seed=1: give --seeds",
        ),
        (functools.partial(_runs, "model.mlp_dim=1", "model.mlp_dim=2"), "mlp_dim is given twice"),
        (functools.partial(_runs, "attention.rnk=1"), "--set attention.rnk: .*mean 'rank'"),
        (functools.partial(_runs, "attention.rank=8,x"), "--set attention.rank=x: must be a whole"),
        (functools.partial(_runs, "attention.rank=8,-1"), "attention.rank = -1: must lie"),
        (functools.partial(_runs, "attention.rank=8,64", seeds=501), "make 1,002 runs: .* 1,000"),
        (
            functools.partial(_runs, "optimizer.lr_scale=1,1.0"),
            "lr_scale=1_seed=0 and lr_scale=1.0_seed=0 are the same computation",
        ),
        (functools.partial(_runs, "train.log_every=1,2"), "are the same computation"),
        (
            functools.partial(_runs, files=(CONFIGS / "lrkv_tny.py",)),
            "^/.*lrkv_tny.py: no such file; did you mean configs/lrkv_tiny.py",
        ),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()
