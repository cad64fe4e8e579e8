"""Overrides of config keys on the command line: --config.train.num_steps=100."""

from collections.abc import Sequence
import typing

from kvjax.foundation.errors import UserError
from kvjax.foundation.text import did_you_mean

if typing.TYPE_CHECKING:
    import ml_collections

PREFIX = "--config"


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into other options and config overrides (--config.key=value each)."""
    others, overrides = [], []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith((f"{PREFIX}.", f"--no{PREFIX[2:]}.")):
            others.append(argument)
            continue
        if "=" not in argument and remaining and not remaining[0].startswith("--"):
            argument = f"{argument}={remaining.pop(0)}"
        overrides.append(argument)
    return others, overrides


def apply(
    config: "ml_collections.ConfigDict", overrides: Sequence[str]
) -> "ml_collections.ConfigDict":
    """Returns the config with overrides applied.

    Raises:
      UserError: no such key (the message lists the known ones), or a value of another type.
    """
    from absl import flags
    from ml_collections import config_flags

    for override in overrides:
        _check(override, config)
    values = flags.FlagValues()
    name = PREFIX.removeprefix("--")
    argv = ["", *overrides]
    config_flags.DEFINE_config_dict(name, config, flag_values=values, sys_argv=argv)
    for override in overrides:
        try:
            values(["", override])
        except Exception as error:  # differs by type of value
            raise UserError(f"{override}: {_expected(override, config)}") from error
    return values[name].value


def _check(override: str, config: "ml_collections.ConfigDict") -> None:
    """Raises a UserError for an override that does not name a key of the config."""
    import ml_collections

    flag, equals, _ = override.partition("=")
    keys = flag.removeprefix("--no").removeprefix("--").split(".")[1:]
    section, where = config, "config"
    for key in keys:
        if not isinstance(section, ml_collections.ConfigDict):
            raise UserError(f"{flag}: {where} is a value, not a section")
        if key not in section:
            hint = did_you_mean(key, section) or _elsewhere(key, config)
            it = f"{hint} It" if hint else "; it"
            raise UserError(
                f"{flag}: {where} has no key {key!r}{it} has {', '.join(sorted(section))}"
            )
        section, where = section[key], f"{where}.{key}"
    if isinstance(section, ml_collections.ConfigDict):
        raise UserError(f"{flag}: {where} is a section; give one of {', '.join(sorted(section))}")
    if flag.startswith("--no") and (equals or not isinstance(section, bool)):
        raise UserError(f"{flag}: --no takes a key that is true or false, without a value")
    if not equals and not isinstance(section, bool):
        raise UserError(f"{flag}: give a value, as in {flag}={section}")


def _elsewhere(key: str, config: "ml_collections.ConfigDict") -> str:
    """Returns "; did you mean config.train.num_steps?" for a key of another section, or ""."""
    for name, section in config.items():
        if hasattr(section, "keys") and key in section:
            return f"; did you mean config.{name}.{key}?"
    return ""


def _expected(override: str, config: "ml_collections.ConfigDict") -> str:
    """Returns the type that an override's value must have."""
    value = config
    for key in override.partition("=")[0].removeprefix("--").split(".")[1:]:
        value = value[key]
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        tuple: "a tuple, as (8, 16)",
        list: "a list, as [8, 16]",
    }
    return f"must be {kinds.get(type(value), type(value).__name__)}; its default is {value!r}"
