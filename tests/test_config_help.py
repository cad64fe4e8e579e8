"""The help of kvjax.main lists all keys with their meanings."""

import dataclasses
import sys

import pytest

from kvjax import config_help, main
from kvjax.attention import MECHANISMS
from kvjax.foundation import command_line, config_keys
from kvjax.foundation.checkout import CONFIGS

SECTIONS = config_help.SECTIONS | {f"attention {kind}": cls for kind, cls in MECHANISMS.items()}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_in_words(section):
    keys = config_keys.keys(SECTIONS[section])
    assert keys and not [key.name for key in keys if len(key.meaning) < 5]


def test_help_lists_the_keys_and_configs_there_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["kvjax train"])
    assert command_line.status(main.main, ["--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    config = command_line.load_config(CONFIGS / "mid.py:lrkv_tiny")
    sections = {name for name, part in config.items() if hasattr(part, "items")}
    assert sections == {*config_help.SECTIONS, "attention"}
    for section in config_help.SECTIONS:
        listed = out.partition(f"keys of config.{section}:")[2].partition("\n\n")[0]
        names = {line.split()[0].rstrip(":") for line in listed.splitlines() if line[:3].strip()}
        assert names == set(config[section])
    words = " ".join(out.split())
    for cls in SECTIONS.values():
        for key in config_keys.keys(cls):
            default = f" ({key.default})" if key.default else ""
            assert " ".join(f"{key.name}{default}: {key.meaning}".split()) in words
    for kind in MECHANISMS:
        assert f"keys of config.attention with kind={kind!r}:\n  " in out
    assert "\nconfig.attention.layer_ranks: " in out
    for name, text in command_line.config_list().items():
        assert f"{name}: {text}" in words


def test_arguments_of_a_run(monkeypatch, capsys):
    from kvjax.training import loop

    calls = []

    def note(name):
        return lambda *args, **keys: calls.append((name, args, keys))

    monkeypatch.setattr(main.runtime, "start", note("runtime"))
    monkeypatch.setattr(main.distributed, "start", note("job"))
    monkeypatch.setattr(loop, "train", note("train"))
    for arguments, message in (
        ("--connect_seconds=0", "--connect_seconds = 0: must be at least 1"),
        ("--heartbeat_seconds=-1", "--heartbeat_seconds = -1: must be at least 1"),
        ("--prepare_hours=-1", "--prepare_hours = -1.0: must be at least 0 and at most 1e+06"),
        ("--prepare_hours=nan", "--prepare_hours = nan: must be at least 0 and at most 1e+06"),
    ):
        assert command_line.status(main.main, [arguments]) == 2 and not calls
        assert capsys.readouterr().err == f"kvjax: {message}\n"
    no_job = dict(coordinator=None, num_processes=None, process_id=None)
    no_job |= dict(connect_seconds=300, heartbeat_seconds=100)
    job_options = dict(coordinator="a:1", num_processes=3, process_id=2)
    job_options |= dict(connect_seconds=1, heartbeat_seconds=4)
    options = ["--workdir=x", "--prepare_hours=0", "--config.train.seed=3"]
    options += ["--trackers=none", "--profile_steps=4"]
    options += [f"--{key}={value}" for key, value in job_options.items()]
    for arguments, workdir, hours, trackers, steps, seed, job in (
        ([], "runs/lrkv_tiny", 1.0, ("tensorboard",), 0, 0, no_job),
        (options, "x", 0.0, (), 4, 3, job_options),
    ):
        assert command_line.status(main.main, arguments) == 0
        assert calls[:2] == [("runtime", (), {}), ("job", (), job)]
        ((name, (config, path), keys),) = calls[2:]
        assert 0 < keys.pop("seconds_before") < 3600
        expected = dict(prepare_hours=hours, trackers=trackers, profile_steps=steps)
        assert (name, path, keys) == ("train", workdir, expected)
        assert (config.name, config.train.seed) == ("lrkv_tiny", seed)
        calls.clear()


def test_meanings_come_from_comments_or_docstrings():
    @dataclasses.dataclass
    class Section:
        """A section.

        third: from the docstring,
          over two lines.
        """

        first: int  # behind it
        # above it,
        # in two lines
        second: str = "x"
        third: float = 0.5
        fourth: int = 1

    assert [dataclasses.astuple(key) for key in config_keys.keys(Section)] == [
        ("first", "", "behind it"),
        ("second", "'x'", "above it, in two lines"),
        ("third", "0.5", "from the docstring, over two lines."),
        ("fourth", "1", ""),
    ]
