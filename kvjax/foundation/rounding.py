"""Sizes in whole multiples of something."""


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
