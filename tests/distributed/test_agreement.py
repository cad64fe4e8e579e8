"""Processes run the same programs, and one alone agrees with itself."""

import hashlib
import json

import pytest

from kvjax import distributed
from kvjax.distributed import agreement
from kvjax.foundation.errors import UserError


def test_programs_that_differ_are_named(monkeypatch):
    texts = {"training step": "all_reduce", "evaluation step": "add"}
    distributed.check_same_programs(texts)
    theirs = dict.fromkeys(texts, hashlib.sha256(b"add").hexdigest()[:12])
    monkeypatch.setattr(agreement, "gather", lambda name, mine: [mine, json.dumps(theirs)])
    with pytest.raises(
        UserError, match=r"training step: \w+ \(process 0\), \w+ \(process 1\)"
    ) as e:
        distributed.check_same_programs(texts)
    assert "evaluation step" not in str(e.value)


def test_one_process_agrees_with_itself(tmp_path):
    assert distributed.gather("x", "y") == ["y"]
    distributed.check_same({"a": 1})
    assert distributed.leaders("x", tmp_path / "none") == [0]
    assert not (tmp_path / "none").exists()
    team = distributed.Team("x", tmp_path)
    assert (team.index, team.size) == (0, 1)
    team.say("done")
    team.wait_for("done")
    with pytest.raises(UserError, match="mine"), distributed.ending_together():
        raise UserError("mine")
