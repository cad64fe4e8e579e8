"""Tasks by names, patterns, tags and groups, and unsupported ones, of a stand-in of the library."""

import pytest

from kvjax.foundation.errors import UserError
from tests.lm_eval import stand_in


def test_tasks_by_names_patterns_tags_and_groups(index):
    """The library's index is slow: it is read once, and only if the folder's does not suffice."""
    assert index("gsm8k", "arc_*", "arc_easy") == ["gsm8k", "arc_challenge", "arc_easy"]
    assert sorted(index("arc")) == ["arc_challenge", "arc_easy"]
    assert index("both") == ["the group both"]
    assert index("texts", num_fewshot=0) == index("texts") == ["texts"]
    assert stand_in.TaskManager.made == [(None, True)]
    assert index("mine", "in_*", include_path="own") == ["mine", "the group in_place"]
    assert stand_in.TaskManager.made == [(None, True), ("own", False)]
    for names, found in (
        (["of_both"], ["the group of_both"]),
        (["mine", "gsm8k"], ["mine", "gsm8k"]),
    ):
        stand_in.TaskManager.made.clear()
        assert index(*names, include_path="own") == found
        assert stand_in.TaskManager.made == [("own", False), ("own", True)]


def test_unsupported_tasks(index):
    unsafe = "executes programs that the model writes, and lm-evaluation-harness has no sandbox: "
    unsafe += "python -m kvjax.evaluate --tasks=humaneval has one"

    for name, said in {
        "humaneval": f"humaneval {unsafe}",
        "code": f"humaneval {unsafe}",
        "holds": f"humaneval {unsafe}",
        "deep": f"humaneval {unsafe}",
        "told": f"inner {unsafe}",
        "written": f"written {unsafe}",
        "pictures": "pictures has other inputs than text, which the model cannot read",
        "broken": "broken cannot be read: KeyError: 'output_type'",
        "arc_eazy": "'arc_eazy' is none of 23 tasks; did you mean 'arc_easy'?",
        "zzz": "'zzz' is none of 23 tasks",
    }.items():
        with pytest.raises(UserError) as refused:
            index(name)
        assert str(refused.value) == f"--tasks: {said}"

    def refused(said):
        return pytest.raises(UserError, match=said)

    with refused("--tasks: beams: generation_kwargs: num_beams = 4 is not supported"):
        index("beams")
    with refused("--num_fewshot=3: texts scores whole texts, without examples"):
        index("texts", num_fewshot=3)
    with refused("gsm8k: .*max_gen_toks = 9 must be less than max_length = 9"):
        index("gsm8k", max_length=9)
