"""A fixture that replaces training by given figures."""

import json
import types

import pytest

from experiments import record
from experiments.studies import grid, side_by_side


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replaces training; returns the runs asked for, failing cells, and `bpb`, a function of a run.

    Results and runs are in an empty folder.
    """
    made = types.SimpleNamespace(asked=[], failing=set(), bpb=None, results=tmp_path / "results")

    def train(runs, folder, **_):
        for one in runs:
            made.asked.append(one.name)
            (folder / one.name).mkdir(parents=True, exist_ok=True)
            about = dict(identity=one.identity, code=grid.code(), made_by={})
            (folder / one.name / grid.ABOUT).write_text(json.dumps(about))
            yield one, "it failed" if one.cell.name in made.failing else ""

    def figures(run, folder):
        bpb = made.bpb(run)
        return dict(bpb=bpb, curve={run.steps: bpb}, tokens_per_second=1e4, seconds=100.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "RESULTS", made.results)
    monkeypatch.setattr(side_by_side, "train", train)
    monkeypatch.setattr(side_by_side, "figures", figures)
    monkeypatch.setattr(side_by_side.runtime, "start", lambda: None)
    return made
