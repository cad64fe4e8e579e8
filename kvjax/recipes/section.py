"""A section of a config."""

import dataclasses


def keys(config) -> dict:
    """A section of a config from what it is read into: every key, with its default."""
    return dataclasses.asdict(config)
