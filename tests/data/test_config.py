"""Bad values are refused with the key, the value and what is allowed."""

import dataclasses
import importlib
import pkgutil

import pytest

from kvjax import data
from kvjax.data import config as config_lib
from kvjax.foundation.errors import UserError


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("source", " ", "'embedded'"),
        ("validation_source", " , ", "'embedded'"),
        ("validation_fraction", 0.0, "between 0 and 1"),
        ("validation_fraction", 1.0, "between 0 and 1"),
        ("tokenizer", "gpt2", "tokenizer.json"),
        ("vocab_size", 256, "at least 257"),
        ("sequence_length", 0, "at least 1"),
        ("sequence_length", 99_999_999_999, "at most 16,777,216"),
        ("vocab_size", 1 << 25, "at most 16,777,216"),
        ("source", "a.txt,hdfs://host/x", "'hdfs://host/x': hdfs:// is not supported"),
        ("source", "prepared:gs://bucket/x", "gs:// needs .*pip install 'kvjax.gcs.'"),
        ("validation_source", "s3://bucket/x.txt", "s3:// needs .*pip install .*epath-s3"),
        ("tokenizer", "gs://bucket/tokenizer.json", "gs:// needs"),
        ("directory", "gs://bucket/x", "gs:// needs"),
    ],
)
def test_bad_value_is_refused(key, value, allowed):
    with pytest.raises(UserError, match=f"^config.data.{key} = .*{allowed}"):
        config_lib.DataConfig(**{key: value})


def test_defaults_and_what_never_changes():
    """Dataclasses are frozen, except the entries of open readers."""
    expected = dict(source="embedded", validation_source="", validation_fraction=0.005)
    expected |= dict(text_key="text", tokenizer="bpe", vocab_size=2048, sequence_length=256)
    assert dataclasses.asdict(config_lib.DataConfig()) == expected | dict(
        specials="bos", directory=""
    )
    classes = set()
    for module in pkgutil.iter_modules(data.__path__):
        if module.name != "beam":  # needs Apache Beam
            values = vars(importlib.import_module(f"kvjax.data.{module.name}")).values()
            classes |= {v for v in values if isinstance(v, type) and dataclasses.is_dataclass(v)}
    classes = {cls for cls in classes if cls.__module__.startswith("kvjax.data.")}
    assert {cls.__name__ for cls in classes if not cls.__dataclass_params__.frozen} == {"_Entry"}
    assert len(classes) > 8


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
