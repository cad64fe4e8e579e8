"""What a workdir says of its run, where anyone may have written it."""

import pytest

from kvjax.foundation.errors import UserError
from kvjax.workdir import trained


@pytest.mark.parametrize("depth", [500, 1_200, 5_000, 200_000])
@pytest.mark.parametrize("start, end", [("[", "]"), ('{"a": ', "}")])
def test_nesting_without_end_is_no_config(tmp_path, depth, start, end):
    for text in (start * depth, start * depth + "1" + end * depth):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=f"^{tmp_path}/config.json"):
            trained.experiment_of(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"", b"{", b"[]", b'"a"', b"{}"])
def test_what_is_no_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=f"^{tmp_path}/config.json"):
        trained.experiment_of(tmp_path)


def test_a_workdir_that_nothing_opens():
    with pytest.raises(UserError, match="^--workdir = 'hdfs://host/run': nothing here opens"):
        trained.experiment_of("hdfs://host/run")
