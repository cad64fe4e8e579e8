"""The cross-attention study: its task, its accuracy, and a model that learns it."""

import numpy as np
import pytest

from experiments.studies import cross_attention as study


def _text(answer):
    letters = answer[: list(answer).index(study.END)]
    return "".join(study.LETTERS[token - study.FIRST_LETTER] for token in letters)


def test_answers_are_the_digits_names_in_reverse():
    sources, lengths, answers = study.questions(np.random.default_rng(0), 50)
    for source, length, answer in zip(sources, lengths, answers, strict=True):
        digits = [int(token) - study.FIRST_DIGIT for token in source[:length]]
        assert _text(answer).split() == [study.NAMES[d] for d in reversed(digits)]
        assert (answer[len(_text(answer)) :] == study.END).all()
    assert set(lengths) == set(range(1, study.DIGITS + 1))
    longest = " ".join([max(study.NAMES, key=len)] * study.DIGITS)
    assert len(longest) + 1 <= study.ANSWER
    assert study.VOCABULARY > answers.max() >= study.FIRST_LETTER


def test_an_eighth_of_the_sources_of_three_or_more_digits_is_held_out():
    rng = np.random.default_rng(2)

    def source_set(count, **keys):
        sources, lengths, _ = study.questions(rng, count, **keys)
        return {(n, *row[:n]) for row, n in zip(sources.tolist(), lengths, strict=True)}

    held_out = source_set(500, held_out=True)
    assert not held_out & source_set(20_000) and len(held_out) > 200
    digits = rng.integers(0, 10, (10_000, study.DIGITS))
    assert 0.1 < study._is_held_out(digits, np.full(10_000, study.DIGITS)).mean() < 0.15
    assert not study._is_held_out(digits, np.full(10_000, 2)).any()


def test_accuracy_of_answers():
    _, _, answers = study.questions(np.random.default_rng(1), 4)
    ends = [list(answer).index(study.END) for answer in answers]
    decoded = answers.copy()
    decoded[0, ends[0] + 1 :] = study.FIRST_LETTER  # tokens after END do not count
    assert study.right(decoded, answers) == 1
    decoded[1, 0] = study.FIRST_LETTER + (decoded[1, 0] == study.FIRST_LETTER)  # a wrong letter
    decoded[2, ends[2]] = study.FIRST_LETTER  # no END after the letters
    assert study.right(decoded, answers) == 0.5


def test_cached_bytes_by_kind():
    bytes_of = {
        kind: sum(4 * int(np.prod(f.shape)) for f in study.config_of(kind).cross.entry().values())
        for kind in study.KINDS
    }
    assert bytes_of == dict(mha=512, lrkv=400, mqa=128, lrkv_tied=400)
    assert study.config_of("lrkv_tied").encoder.tie == "qkv"


@pytest.mark.slow
def test_a_few_steps_reduce_the_loss(monkeypatch):
    monkeypatch.setattr(study, "EVERY", 10)
    monkeypatch.setattr(study, "HELD_OUT", 32)
    result = study.train("lrkv", 0, 20)
    losses = [point["loss"] for point in result["curve"].values()]
    assert list(result["curve"]) == [10, 20] and losses[1] < losses[0] < 3.4
    assert result["right"] == result["curve"][20]["right"]
    assert result["steps"] is None and result["cached_bytes"] == 400
