"""What stands with a result: who made it, and how long the process had run."""

import json

from kvjax.foundation import provenance


def test_a_result_says_what_made_it_and_how_long_the_process_ran(tmp_path, monkeypatch):
    at = provenance._BEGUN + 12.34
    monkeypatch.setattr(provenance.time, "monotonic", lambda: at)
    provenance.save(tmp_path / "made" / "x.json", dict(figure=1))
    found = json.loads((tmp_path / "made" / "x.json").read_text())
    made_by = found.pop("made_by")
    assert found == dict(figure=1) and made_by["process_seconds"] == 12.3
    assert made_by["packages"]["jax"] and {"command", "date", "commit", "machine"} <= made_by.keys()
