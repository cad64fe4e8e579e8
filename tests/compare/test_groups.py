"""Groups of runs: means over seeds, names, token savings."""

import json

import numpy as np
import pytest
from scipy import stats

from kvjax.compare import report, savings as savings_lib
from kvjax.foundation.errors import UserError
from tests.compare.written import grouped, write_run


def test_seeds_are_one_curve_with_an_interval(tmp_path):
    curves = [(4.0, 3.0, 2.5, 2.2), (4.2, 3.1, 2.4, 2.3), (4.1, 2.9, 2.6, 2.1)]
    for seed, bpb in enumerate(curves):
        write_run(tmp_path / f"s{seed}", seed=seed, bpb=bpb)
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1, 2] and group.name == "lrkv_tiny"
    np.testing.assert_allclose(group.curve.bpb, np.mean(curves, axis=0))
    half = stats.sem(curves, axis=0) * stats.t.ppf(0.975, 2)
    np.testing.assert_allclose(group.curve.half, half)
    assert group.final.half == pytest.approx(half[-1])


def test_curves_have_the_steps_of_all_seeds(tmp_path):
    write_run(tmp_path / "a", steps=(25, 50, 100), bpb=(4, 3, 2), seed=0)
    write_run(tmp_path / "b", steps=(50, 75, 100), bpb=(3.5, 2.7, 2.5), seed=1)
    (group,) = grouped(tmp_path)
    assert group.curve.steps.tolist() == [50, 100]
    np.testing.assert_allclose(group.curve.bpb, [3.25, 2.25])


def test_keys_that_change_no_computation_are_ignored(tmp_path):
    """Ignores a run's name, keys that are newer than the run, and how often it evaluates."""
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, log_every=3, eval_every=17)
    tree = json.loads((tmp_path / "b" / "config.json").read_text())
    tree["name"] = "sweeps/b"
    del tree["model"]["norm_gain"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(tree))
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1]


def test_repeated_seeds_are_refused(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    with pytest.raises(UserError, match=r"b has the config and the seed \(0\) of .*a: give one"):
        grouped(tmp_path)


def test_a_running_group_has_a_curve_and_no_result(tmp_path):
    write_run(tmp_path / "a", steps=(25, 50), bpb=(4, 3))
    (group,) = grouped(tmp_path / "a", running=True)
    assert not group.finished and group.final is None
    assert group.curve.bpb.tolist() == [4, 3]
    assert savings_lib.savings([group], group) == [] and report._cache_points([group]) == {}


def test_runs_of_other_lengths_have_no_difference(tmp_path):
    write_run(tmp_path / "short", config="mha_tiny")
    options = dict(num_steps=200, steps=(100, 200), bpb=(2, 1))
    write_run(tmp_path / "long" / "s0", **options)
    write_run(tmp_path / "long" / "s1", seed=1, num_steps=200, steps=(100,), bpb=(2,))
    groups = grouped(tmp_path / "short", tmp_path / "long", running=True)
    assert report.rows(groups, groups[0])[1]["against"] is None
    assert savings_lib.savings(groups, groups[0]) == []


def test_savings_within_a_run_are_interpolated(tmp_path):
    """From 3.0 at 50 steps to 2.5 at 75: 2.6 is passed at 70, 30 % before the end."""
    write_run(tmp_path / "a", bpb=(4, 3, 2.5, 2.25))
    write_run(tmp_path / "b", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    ours, theirs = grouped(tmp_path)
    (saving,) = savings_lib.savings([ours, theirs], theirs)
    assert (saving.leader, saving.behind) == ("lrkv_tiny", "mha_tiny")
    assert saving.within_a_run.mean == pytest.approx(0.30)
    assert saving.at_equal_horizon is None
    (other,) = savings_lib.savings([ours, theirs], ours)
    assert other == saving  # with either reference


def test_savings_at_equal_horizon_are_of_finished_runs(tmp_path):
    """Ended after 50 steps at 2.8 and after 100 at 2.4: 2.6 takes 50·√2."""
    write_run(tmp_path / "short", num_steps=50, steps=(25, 50), bpb=(4, 2.8))
    write_run(tmp_path / "whole", bpb=(4, 3, 2.5, 2.4))
    write_run(tmp_path / "other", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    groups = grouped(tmp_path)
    reference = next(group for group in groups if group.name == "mha_tiny")
    (saving,) = savings_lib.savings(groups, reference)
    assert saving.within_a_run.mean == pytest.approx(0.30)
    assert saving.at_equal_horizon.mean == pytest.approx(1 - 50 * np.sqrt(2) / 100)
    ended = [(50, 2.8), (100, 2.4), (200, 2.4)]
    for loss, share in ((2.8, 0.5), (2.4, 0.0), (2.81, None), (2.39, None)):
        saved = savings_lib._between(ended, loss, 100)
        assert saved == (share if share is None else pytest.approx(share))


def test_seeds_that_never_reach_the_loss_leave_no_mean(tmp_path):
    for seed, last in enumerate((1.8, 2.05, 2.05)):
        write_run(tmp_path / f"a{seed}", seed=seed, bpb=(4, 3, 2.5, last))
        write_run(tmp_path / f"b{seed}", seed=seed, config="mha_tiny", bpb=(4, 3.5, 3, 2.0))
    ours, theirs = grouped(tmp_path)
    assert savings_lib.within_a_run(ours, theirs) is None


def test_savings_end_at_the_first_evaluation(tmp_path):
    write_run(tmp_path / "a", bpb=(2.0, 1.9, 1.8, 1.7))
    write_run(tmp_path / "b", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    ours, theirs = grouped(tmp_path)
    assert savings_lib.within_a_run(ours, theirs).mean == pytest.approx(0.75)


def test_configs_of_one_name_are_named_by_differing_keys(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", num_steps=200, steps=(100, 200), bpb=(3, 2))
    write_run(tmp_path / "c", config="mha_tiny")
    names = [group.name for group in grouped(tmp_path)]
    assert names == ["lrkv_tiny num_steps=100", "lrkv_tiny num_steps=200", "mha_tiny"]
    names = [group.name for group in grouped(tmp_path, way="none")]
    assert names == [f"{tmp_path}/{name}" for name in "abc"]


def test_numbers_are_those_of_finished_seeds(tmp_path):
    """One seed of each config still runs."""
    for config, bpb in (("lrkv_tiny", (4, 2.5, 2.4, 2.2)), ("mha_tiny", (4, 3.5, 3, 2.5))):
        write_run(tmp_path / config / "s0", config=config, bpb=bpb)
        half = dict(seed=1, steps=(25, 50), bpb=bpb[:2])
        write_run(tmp_path / config / "s1", config=config, **half)
    lrkv, mha = grouped(tmp_path, running=True)
    assert lrkv.tokens == mha.tokens == 100 * 32 * 256
    (saved,) = savings_lib.savings([lrkv, mha], mha)
    assert saved.leader == "lrkv_tiny"
    assert saved.within_a_run.mean == pytest.approx(0.5) and saved.within_a_run.half is None
    (row, _) = report.rows([lrkv, mha], mha)
    assert row["against"] == pytest.approx(-0.3)
    assert row["seconds"] == pytest.approx(100 * 32 * 256 / 8192.0)
    # A seed of the leader that still runs does not count, however low its loss is.
    write_run(tmp_path / "mha_tiny" / "s1", seed=1, config="mha_tiny", bpb=(4, 3.5, 3, 2.5))
    write_run(tmp_path / "lrkv_tiny" / "s1", seed=1, steps=(25, 50, 75), bpb=(2.4, 2.3, 2.2))
    ahead, behind = grouped(tmp_path, running=True)
    assert savings_lib.within_a_run(ahead, behind).mean == pytest.approx(0.5)
