"""Options that are lists."""

import pytest

from kvjax.foundation import lists
from kvjax.foundation.errors import UserError


def test_lists():
    assert lists.names("--mechanisms", "b,a,b", ("a", "b", "c")) == ("b", "a")
    assert lists.integers("--batch", "8,1,8") == (8, 1)
    assert lists.integers("--layers", "1,64", at_most=64) == (1, 64)
    with pytest.raises(UserError, match="--layers '1,65': must be integers of 1 to 64, as in"):
        lists.integers("--layers", "1,65", at_most=64)
    assert lists.integers("--blocks", "128", 128) == (128,)


def test_bad_lists_of_numbers():
    for text in ("", "1,", ",", "x", "1;8", "0", "8,-1", "1.5", "9" * 5000):
        for minimum in (1, 128):
            with pytest.raises(UserError, match=f"--b '.*': must be integers of {minimum} or more"):
                lists.integers("--b", text, minimum)


@pytest.mark.parametrize(
    "text, name, close",
    [("", "", ""), ("mha,", "", ""), ("mha,lkrv", "lkrv", r"; did you mean 'lrkv'\?")],
)
def test_unknown_names(text, name, close):
    message = f"^--mechanisms={text}: '{name}' is none of mha, lrkv{close}$"
    with pytest.raises(UserError, match=message):
        lists.names("--mechanisms", text, ("mha", "lrkv"))
