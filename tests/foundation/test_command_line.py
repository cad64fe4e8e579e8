"""Config files with overrides, options, and the exit statuses of commands."""

import argparse
import pathlib
import re

import pytest

from kvjax.foundation import command_line, interrupted
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError

LRKV = CONFIGS / "lrkv_tiny.py"


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
        ("--noconfig.train.num_steps", "--no takes a key that is true or false"),
        ("--noconfig.model.bias=true", "--no takes a key that is true or false, without a"),
        ("--config.model.bias=perhaps", "must be true or false; its default is False"),
        ("--config.attention.layer_ranks=(1,", "must be a tuple, as \\(8, 16\\)"),
    ],
)
def test_bad_override(override, message):
    with pytest.raises(UserError, match=message):
        load_config(LRKV, [override])


def test_overrides_among_options():
    parser = command_line.Parser("A command.", config=True)
    parser.add_output()
    flags = ["--config.model.bias", "--config.train.seed", "3", "--noconfig.model.bias", "--json"]
    options = parser.parse([*flags[:1], "--markdown", *flags[1:]])
    assert options.json and options.markdown
    assert options.overrides == [flags[0], "--config.train.seed=3", flags[3]]
    with pytest.raises(UserError, match="^unknown option --config.model.bias"):
        command_line.Parser("A command.").parse(flags[:1])


def test_missing_files():
    # Several files have a variant lrkv_128m; the folder decides which one is suggested.
    with pytest.raises(UserError, match=r"has moved: give --config=configs/mid.py:lrkv_128m"):
        load_config(pathlib.Path("configs/mid/lrkv_128m.py"))
    with pytest.raises(UserError, match="no such file; did you mean --config=.*lrkv_tiny.py"):
        load_config(LRKV.with_name("lrvk_tiny.py"))
    with pytest.raises(UserError, match="no such file; did you mean --config=.*lrkv_tiny.py"):
        load_config(pathlib.Path("lrkv_tny"))
    with pytest.raises(UserError, match="no such file; in .*configs there are .*lrkv_tiny"):
        load_config(pathlib.Path("nothing/of/the/kind.py"))
    with pytest.raises(UserError, match="no such file; in"):
        load_config(pathlib.Path("\ud800"))
    with pytest.raises(UserError, match="is a folder; give a file. It has .*lrkv_tiny.py"):
        load_config(LRKV.parent)


def test_a_workdir_of_a_configs_name_is_not_the_config(tmp_path, monkeypatch):
    """A run resumes by the command that began it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lrkv_tiny").mkdir()
    assert command_line.config_file(pathlib.Path("lrkv_tiny")) == CONFIGS / "lrkv_tiny.py"


RANKS = CONFIGS / "ranks.py"


def test_a_variant_of_a_file():
    config = load_config(f"{RANKS}:lrkv_r16_128m", ["--config.train.seed=3"])
    assert (config.name, config.attention.rank, config.train.seed) == ("lrkv_r16_128m", 16, 3)
    assert load_config(CONFIGS / "mid.py:lrkv_tiny").name == "mid/lrkv_tiny"


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "ranks.py",
            "as --config=.*/ranks.py:lrkv_r0_128m; there are lrkv_r0_128m, lrkv_r128_128m",
        ),
        ("ranks.py:", "as --config=.*/ranks.py:lrkv_r0_128m; there are"),
        (
            "ranks.py:lrkv_r17_128m",
            "no variant 'lrkv_r17_128m'; did you mean lrkv_r16_128m or .*?$",
        ),
        ("ranks.py:x", "no variant 'x'; there are lrkv_r0_128m, .*lrkv_r96_128m$"),
        ("rank.py:lrkv_r16_128m", "mean --config=configs/ranks.py:lrkv_r16_128m[?]$"),
        ("lrkv_r16_128m.py", "mean --config=configs/ranks.py:lrkv_r16_128m[?]$"),
        ("lrkv_tiny.py:x", "TypeError: get_config"),
    ],
)
def test_unknown_variants(name, message):
    with pytest.raises(UserError, match=f"^--config=.*/{re.escape(name)}: .*{message}"):
        load_config(CONFIGS / name)


def test_configs_beside_one():
    def names(file):
        return [command_line.config_label(f) for f in command_line.configs_beside(file)]

    assert {"lrkv_tiny", "mha_6p3b"} < set(names(LRKV))
    assert not {"lrkv_r16_128m", "ranks"} & set(names(LRKV))
    assert len(names(CONFIGS / "ranks.py:lrkv_r16_128m")) == 14


def test_shipped_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = command_line.Parser("A command.", config=True)

    def parsed(name):
        return parser.parse([f"--config={name}"]).config

    for name in ("configs/lrkv_tiny.py", "./configs/../configs/lrkv_tiny.py"):
        assert parsed(name).resolve() == LRKV.resolve()
    assert parsed("configs/ranks.py:lrkv_r8_128m") == CONFIGS / "ranks.py:lrkv_r8_128m"
    for name in ("lrkv_tiny.py", "other/lrkv_tiny.py", "configs/nothing.py"):
        assert parsed(name) == pathlib.Path(name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lrkv_tiny.py").touch()
    for name in ("configs/lrkv_tiny.py", "~/configs/lrkv_tiny.py"):
        assert parsed(name).resolve() == tmp_path / "configs" / "lrkv_tiny.py"


def test_messages_name_the_option():
    options = argparse.Namespace(seed=-1)
    for message, expected in (
        ("seed = -1: must be", "--seed = -1: must be"),
        ("config.train.seed = -1: must be", "config.train.seed = -1: must be"),
        ("no seed", "no seed"),
    ):
        with (
            pytest.raises(UserError, match=f"^{expected}"),
            command_line.naming_options(options),
        ):
            raise UserError(message)


@pytest.mark.parametrize(
    "error, status, message",
    [
        (UserError("x = 1: must be 2"), 2, "kvjax: x = 1: must be 2\n"),
        (NotImplementedError("no such kernel"), 2, "kvjax: no such kernel\n"),
        (FileNotFoundError(2, "not there", "x"), 2, "kvjax: [Errno 2] not there: 'x'\n"),
        (TimeoutError(), 2, "kvjax: TimeoutError\n"),
        (MemoryError(), 2, "kvjax: out of memory (MemoryError): reduce sizes,"),
        (
            ModuleNotFoundError("x", name="no_such.part"),
            2,
            "kvjax: no_such is not installed: pip install kvjax\n",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED: 7 bytes\nmore"), 2, "kvjax: out of memory (RESOURCE"),
        (
            RuntimeError("Unable to initialize backend 'x': y\nz"),
            2,
            "kvjax: JAX_PLATFORMS=x: Unable to initialize backend 'x': y. JAX_PLATFORMS=cpu runs",
        ),
        (type("PanicException", (BaseException,), {})("at 7\nmore"), 2, "native code: at 7. Is"),
        (KeyboardInterrupt(), 130, "kvjax: interrupted\n"),
        (BrokenPipeError(), 1, ""),
        (SystemExit(75), 75, ""),
        (SystemExit(), 0, ""),
        (SystemExit("a word"), 1, ""),
    ],
)
def test_exit_statuses(capsys, monkeypatch, error, status, message):
    monkeypatch.setenv("JAX_PLATFORMS", "x")

    def command(arguments):
        assert arguments == ["--x"]
        raise error

    assert command_line.status(command, ["--x"]) == status
    out, err = capsys.readouterr()
    assert not out and message in err and len(err.splitlines()) == bool(message)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError])
def test_a_ctrl_c_is_reported_once(capsys, monkeypatch, error):
    """It is, even if a library turned KeyboardInterrupt into its own exception."""
    monkeypatch.setattr(interrupted, "_received", True)
    monkeypatch.setattr(interrupted, "_taken", False)

    def command(arguments):
        raise error("what a library says")

    assert command_line.status(command, []) == 130
    assert capsys.readouterr() == ("", "kvjax: interrupted\n")
    assert interrupted._taken


@pytest.mark.parametrize("bug", [KeyError("a bug"), ModuleNotFoundError("x", name="json.none")])
def test_a_bug_keeps_its_traceback(bug):
    def command(arguments):
        raise bug

    with pytest.raises(type(bug)):
        command_line.status(command, [])


@pytest.mark.parametrize(
    "code, message",
    [
        ("a = 1", "needs a get_config"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def get_config(): return {}['x']", "KeyError: 'x'"),
    ],
)
def test_bad_config_files(tmp_path, code, message):
    (tmp_path / "x.py").write_text(f"{code}\n")
    with pytest.raises(UserError, match=f"^--config={tmp_path}/x.py: {message}"):
        load_config(tmp_path / "x.py")
