"""Options that are lists."""

import pytest

from kvjax.foundation import lists
from kvjax.foundation.errors import UserError


def test_what_is_given():
    assert lists.names("--mechanisms", "b,a,b", ("a", "b", "c")) == ("b", "a")
    assert lists.integers("--batch", "8,1,8") == (8, 1)
    assert lists.integers("--layers", "1,64", at_most=64) == (1, 64)
    with pytest.raises(UserError, match="--layers '1,65': must be integers of 1 to 64, as in"):
        lists.integers("--layers", "1,65", at_most=64)
    assert lists.integers("--blocks", "128", 128) == (128,)


def test_what_is_no_list_of_numbers():
    for text in ("", "1,", ",", "x", "1;8", "0", "8,-1", "1.5", "9" * 5000):
        said = "--batch '.*': must be integers of 1 or more, as in 1,8"
        with pytest.raises(UserError, match=said):
            lists.integers("--batch", text)
        with pytest.raises(UserError, match="--blocks '.*': must be integers of 128 or more"):
            lists.integers("--blocks", text, 128)


@pytest.mark.parametrize(
    "text, name, close",
    [("", "", ""), ("mha,", "", ""), ("mha,lkrv", "lkrv", r"; did you mean 'lrkv'\?")],
)
def test_names_that_are_not_there(text, name, close):
    said = f"^--mechanisms={text}: '{name}' is none of mha, lrkv{close}$"
    with pytest.raises(UserError, match=said):
        lists.names("--mechanisms", text, ("mha", "lrkv"))
