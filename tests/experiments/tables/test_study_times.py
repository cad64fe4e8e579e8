"""Hours of studies, from seconds or rates; shared runs count once."""

import json

import pytest

from experiments.tables import study_times


@pytest.fixture
def results(tmp_path):
    def write(name, **result):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result))

    one = dict(identity="one", seconds=100.0)
    write("a", runs=dict(mha={"0": one, "1": dict(identity="one", seconds=120.0)}))
    by_rate = dict(identity="two", tokens_per_second=50.0)
    write("studies/b", tokens=4_000, runs=dict(mha={"0": one}, mqa={"0": by_rate}))
    write("c", runs=dict(mha={"0": dict(bpb=1.0)}))  # nobody knows how long
    write("d", rows=[1, 2])
    (tmp_path / "e.json").write_text("[1]")
    return tmp_path


def test_hours_of_runs_that_studies_share_count_once(results):
    a, b = study_times.studies(results)
    assert (a.name, a.runs, a.seconds, a.own_seconds) == ("a", 2, 220.0, 220.0)
    assert (b.name, b.runs, b.seconds, b.own_seconds) == ("studies/b", 2, 180.0, 80.0)
    assert (a.by_rate, b.by_rate) == (0, 1)


def test_the_sum_is_of_what_is_there(results, monkeypatch, capsys):
    monkeypatch.setattr(study_times, "RESULTS", results)
    study_times.main(["--json"])
    found, said = capsys.readouterr()
    assert json.loads(found)["seconds"] == 300.0
    assert "0.1 hours in all" in said
