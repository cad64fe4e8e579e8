"""Bad values are refused with the key, the value and what is allowed."""

import pytest

from kvjax.data import config as config_lib


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("source", " ", "'embedded'"),
        ("validation_fraction", 0.0, "between 0 and 1"),
        ("validation_fraction", 1.0, "between 0 and 1"),
        ("text_key", "", "column"),
        ("tokenizer", "gpt2", "tokenizer.json"),
        ("vocab_size", 256, "more than 256"),
        ("sequence_length", 0, "at least 1"),
    ],
)
def test_bad_value_is_refused(key, value, allowed):
    with pytest.raises(ValueError, match=f"{key}=.*{allowed}"):
        config_lib.DataConfig(**{key: value})


def test_vocab_size_matters_to_bpe_only():
    assert config_lib.DataConfig(tokenizer="byte", vocab_size=1).vocab_size == 1


def test_root_is_directory_then_environment_then_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("KVJAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(config_lib.DataConfig().root) == "/home/user/.cache/kvjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(config_lib.DataConfig().root) == "/cache/kvjax"
    monkeypatch.setenv("KVJAX_CACHE", "/kvjax-cache")
    assert str(config_lib.DataConfig().root) == "/kvjax-cache"
    assert str(config_lib.DataConfig(directory="/data").root) == "/data"


def test_command_names_what_is_not_default():
    config = config_lib.DataConfig(source="a b.txt", sequence_length=8, directory="/data")
    assert config.command() == (
        "python -m kvjax.data.prepare '--source=a b.txt' --sequence_length=8 --output=/data"
    )
