"""generation_kwargs of tasks."""

import pytest

from kvjax.decoding.sampling import Sampling
from kvjax.foundation.errors import UserError
from kvjax.lm_eval import generation_settings

GREEDY = Sampling(temperature=0.0)


def test_settings():
    for given, expected in (
        ({}, (256, (), GREEDY)),
        (dict(until="\n"), (256, ("\n",), GREEDY)),
        (dict(until=["a", "", "b"], max_gen_toks=7), (7, ("a", "b"), GREEDY)),
        (dict(max_new_tokens=8, do_sample=False, temperature=0.9), (8, (), GREEDY)),
        (dict(max_tokens=9, max_completion_tokens=3, temperature=0), (9, (), GREEDY)),
        (dict(temperature=0.7), (256, (), Sampling(temperature=0.7))),  # as the library
        (dict(do_sample=True), (256, (), Sampling(temperature=1.0))),
        (
            dict(do_sample=True, temperature=0.2, top_p=0.95, top_k=5),
            (256, (), Sampling(temperature=0.2, top_k=5, top_p=0.95)),
        ),
        (dict(do_sample=True, temperature=0), (256, (), GREEDY)),
        (dict(num_beams=1, until=None), (256, (), GREEDY)),
    ):
        kept = dict(given)
        assert generation_settings.parse(given, max_length=1024) == expected
        assert given == kept  # a task's own


def test_default_number_of_tokens():
    assert generation_settings.parse({}, max_length=100).num_tokens == 50


def test_refused():
    for given, said in (
        (dict(max_gen_toks=0), "max_gen_toks = 0 must be a whole number of at least 1"),
        (dict(max_gen_toks="8"), "max_gen_toks = '8' must be"),
        (
            dict(max_tokens=64),
            "max_tokens = 64 must be less than max_length = 64, since",
        ),
        (dict(do_sample=True, temperature="hot"), "temperature = 'hot' must be a number"),
        (dict(do_sample=True, top_p=0.0), "top_p"),
        (dict(until=3), "until = 3 must be a text"),
        (dict(until=[3]), "until = "),
        (
            dict(num_beams=4),
            "num_beams = 4 is not supported; supported are max_gen_toks, ",
        ),
        (dict(typical_p=0.5), "typical_p = 0.5 is not supported"),
    ):
        with pytest.raises(UserError, match=said):
            generation_settings.parse(given, max_length=64)
