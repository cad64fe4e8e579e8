"""A config file with overrides, and what is said when that cannot be."""

import pathlib

import pytest

from kvjax.command_line import load_config
from kvjax.errors import UserError

LRKV = pathlib.Path(__file__).parents[1] / "configs" / "lrkv_tiny.py"


def test_overrides_are_typed_and_the_config_is_locked():
    overrides = ["--config.train.num_steps=7", "--config.data.tokenizer=byte"]
    for config in (load_config(LRKV, overrides), load_config(LRKV)):
        assert config.is_locked
    config = load_config(LRKV, overrides)
    assert (config.train.num_steps, config.data.tokenizer) == (7, "byte")
    assert load_config(LRKV).train.num_steps == 500


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "--config.train.nmu_steps=7",
            "config.train has no key 'nmu_steps'; did you mean 'num_steps'\\? It has bad_steps",
        ),
        ("--config.train.seed.x=7", "config.train.seed is a value, not a section"),
        ("--config.train.num_steps=many", "many: must be a whole number; its default is 500"),
        ("--config.train=7", "config.train is a section; give one of bad_steps, batch_size"),
        ("--config.num_steps=7", "no key 'num_steps'; did you mean config.train.num_steps\\?"),
        ("--config.train.num_steps", "give a value, as in --config.train.num_steps=500"),
        ("--noconfig.train.num_steps", "is negated|give a value"),
        ("--config.model.bias=perhaps", "must be true or false; its default is False"),
        ("--config.attention.layer_ranks=(1,", "must be a tuple, as \\(8, 16\\)"),
    ],
)
def test_bad_override(override, message):
    with pytest.raises(UserError, match=message):
        load_config(LRKV, [override])


def test_no_such_file_says_what_there_is():
    with pytest.raises(UserError, match="no such file; did you mean --config=.*lrkv_tiny.py"):
        load_config(LRKV.with_name("lrvk_tiny.py"))
    with pytest.raises(UserError, match="no such file; did you mean --config=.*lrkv_tiny.py"):
        load_config(pathlib.Path("lrkv_tiny"))
    with pytest.raises(UserError, match="no such file; in .*configs there are .*lrkv_tiny"):
        load_config(pathlib.Path("nothing/of/the/kind.py"))
    with pytest.raises(UserError, match="is a folder; give a file. There: .*lrkv_tiny.py"):
        load_config(LRKV.parent)


def test_a_file_that_is_no_config(tmp_path):
    (tmp_path / "x.py").write_text("a = 1\n")
    with pytest.raises(UserError, match="has no get_config"):
        load_config(tmp_path / "x.py")
