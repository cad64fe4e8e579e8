"""What --help says of a config's keys: all of them, each with a meaning."""

import pytest

from kvjax import config_help
from kvjax import main
from kvjax.attention import MECHANISMS
from kvjax.foundation import command_line
from kvjax.foundation import config_keys
from kvjax.foundation.checkout import CONFIGS

SECTIONS = config_help.SECTIONS | {f"attention {kind}": cls for kind, cls in MECHANISMS.items()}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_in_words(section):
    keys = config_keys.keys(SECTIONS[section])
    assert keys and not [key.name for key in keys if len(key.meaning) < 5]


def test_help_lists_the_keys_and_configs_there_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.status(main.main, ["--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    config = command_line.load_config(CONFIGS / "mid" / "lrkv_tiny.py")
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
    for names in command_line.config_names().values():
        assert all(name in out for name in names)


def test_a_meaning_stands_behind_a_field_above_it_or_in_the_docstring():
    import dataclasses

    @dataclasses.dataclass
    class Section:
        """A section.

        third: from the docstring,
          over three
          lines.
        """

        first: int  # behind it
        # above it,
        # in two lines
        second: str = "x"
        third: float = 0.5
        fourth: int = 1

    assert config_keys.keys(Section) == [
        config_keys.Key("first", "", "behind it"),
        config_keys.Key("second", "'x'", "above it, in two lines"),
        config_keys.Key("third", "0.5", "from the docstring, over three lines."),
        config_keys.Key("fourth", "1", ""),
    ]
