"""Rounding to multiples."""


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
