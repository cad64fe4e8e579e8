"""Checks of the parent and the rows of a run on conversations, before anything is trained."""

import dataclasses
import types

from etils import epath
import pytest

from kvjax import config as config_lib, distributed
from kvjax.conversation import prepare
from kvjax.data import loader, tokenizer as tokenizer_lib
from kvjax.data.tokenizer import CONVERSATION_SPECIALS
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.training import conversations

BYTES = tokenizer_lib.byte_tokenizer()
TALKING = BYTES.with_specials(CONVERSATION_SPECIALS)


@pytest.fixture
def mid():
    """Returns a function of vocabulary and steps: a mid-training config and its experiment."""

    def make(vocab_size=TALKING.vocab_size, num_steps=0, **data):
        config = load_config(CONFIGS / "mid.py:lrkv_tiny")
        config.data.update(vocab_size=vocab_size, **data)
        config.train.update(num_steps=num_steps, batch_size=4, grad_accumulation=1)
        config.train.parent = "runs/parent"
        config.mixture.loss = "assistant"
        return config, config_lib.resolve(config)

    return make


def _parent(model, rows=BYTES.vocab_size):
    model = dataclasses.replace(model, vocab_size=rows)
    return types.SimpleNamespace(
        experiment=types.SimpleNamespace(model=model), tokenizer=BYTES, workdir=epath.Path("w")
    )


def test_a_parent_has_the_model_with_its_own_rows(mid):
    """Keeps the number of rows, to which a run may add for its tokenizer and the special tokens."""
    _, experiment = mid()
    model = experiment.model
    expected = conversations.parent_model(experiment, _parent(model))
    assert expected == dataclasses.replace(model, vocab_size=257)
    texts = types.SimpleNamespace(mixture=None, model=model)
    assert conversations.parent_model(texts, _parent(model)) is model
    for size, rows, needed in ((264, 257, 265), (299, 300, 300)):
        experiment = dataclasses.replace(
            experiment, model=dataclasses.replace(model, vocab_size=size)
        )
        with pytest.raises(UserError, match=f"set --config.data.vocab_size={needed}, or the next"):
            conversations.parent_model(experiment, _parent(model, rows))
    experiment = dataclasses.replace(experiment, model=dataclasses.replace(model, vocab_size=300))
    assert conversations.parent_model(experiment, _parent(model, 300)).vocab_size == 300


def test_one_epoch(mid):
    config, experiment = mid()
    dataset = types.SimpleNamespace(num_rows=dict(train=11).__getitem__)
    changed, grown = conversations.one_epoch(config, experiment, dataset)
    assert changed.train.num_steps == grown.train.num_steps == 2 and changed.is_locked
    assert (config.train.num_steps, experiment.train.num_steps) == (0, 0)
    assert dataclasses.replace(grown, train=experiment.train) == experiment
    planned_config, planned = mid(num_steps=7)
    assert conversations.one_epoch(planned_config, planned, dataset) == (planned_config, planned)
    exactly = types.SimpleNamespace(num_rows=dict(train=4).__getitem__)
    assert conversations.one_epoch(config, experiment, exactly)[1].train.num_steps == 1
    few = types.SimpleNamespace(num_rows=dict(train=3).__getitem__)
    with pytest.raises(UserError, match="= 4: there are 3 rows .*--config.train.batch_size=3 or"):
        conversations.one_epoch(config, experiment, few)


@pytest.fixture
def rows(monkeypatch):
    """Fakes the data set; `prepared` lists (vocabulary, shown) of each preparation."""
    dataset = types.SimpleNamespace(
        path=epath.Path("rows"), digest="d", is_masked=True, vocab_size=265, prepared=[]
    )

    def prepared(mixture, data, tokenizer, *, shown):
        dataset.prepared.append((tokenizer.vocabulary(), shown))
        return dataset.path

    monkeypatch.setattr(prepare, "prepare", prepared)
    monkeypatch.setattr(
        loader, "open_dataset", lambda path: dataset if path == dataset.path else None
    )
    return dataset


def test_rows_are_made_with_the_parents_tokenizer_and_the_special_tokens(mid, rows, tmp_path):
    _, experiment = mid()
    assert experiment.is_masked
    parent = _parent(experiment.model)
    assert conversations.prepare_dataset(experiment, epath.Path("none"), parent) is rows
    (tmp_path / "tokenizer.json").write_text(BYTES.to_json())
    assert conversations.prepare_dataset(experiment, epath.Path(tmp_path), None) is rows
    own = mid(tokenizer="byte")[1]
    assert conversations.prepare_dataset(own, epath.Path("none"), None) is rows
    assert rows.prepared == 3 * [(TALKING.vocabulary(), True)]


def test_rows_that_the_run_cannot_read_are_refused(mid, rows):
    _, experiment = mid()

    def prepare_rows(e):
        return conversations.prepare_dataset(e, epath.Path("none"), _parent(e.model))

    rows.is_masked = False
    with pytest.raises(UserError, match="its rows have no mask, but .* they must have a mask"):
        prepare_rows(experiment)
    rows.is_masked, rows.vocab_size = True, experiment.model.vocab_size + 1
    with pytest.raises(UserError, match="vocab_size = 265: the tokenizer of rows has 266"):
        prepare_rows(experiment)


def test_the_first_process_prepares_the_rows(mid, rows, monkeypatch):
    calls = []
    team = types.SimpleNamespace(
        announce=lambda word: calls.append(f"says {word}"),
        wait_for=lambda word, leader: calls.append(f"waits {word} {leader}"),
    )
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(
        distributed, "check_same_rows", lambda *arguments: calls.append(arguments[:2])
    )
    monkeypatch.setattr(distributed, "Team", lambda name, root: calls.append(name) or team)
    _, experiment = mid()
    for team.index, expected in (
        (0, ["data", "says finished"]),
        (1, ["data", "waits finished True"]),
    ):
        calls.clear()
        rows.prepared.clear()
        conversations.prepare_dataset(experiment, epath.Path("none"), _parent(experiment.model))
        assert calls == [*expected, (rows.path, "d")]
        assert [shown for _, shown in rows.prepared] == [True, False][team.index :]
