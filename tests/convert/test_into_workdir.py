"""The workdir of a conversion: complete or absent, and ready for fine-tuning."""

import pytest

from kvjax.convert import into_workdir, model as model_lib
from kvjax.foundation.errors import UserError


def test_a_link_is_followed(imported, tmp_path):
    source = model_lib.open(str(imported("llama_tied_bias")))
    for target in ("empty", "missing"):
        (tmp_path / f"{target}_link").symlink_to(tmp_path / target)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "missing"):
        into_workdir.write(source, into_workdir.check(str(tmp_path / f"{target}_link")), {})
        assert (tmp_path / target / "config.txt").exists()
        assert (tmp_path / f"{target}_link").is_symlink()


def test_failed_writes_leave_nothing(imported, tmp_path, monkeypatch):
    source = model_lib.open(str(imported("llama_tied_bias")))
    real = source.read
    count = []

    def failing(path, layer=None):
        count.append(path)
        if len(count) > 8:
            raise OSError(28, "No space left on device")
        return real(path, layer)

    monkeypatch.setattr(source, "read", failing)
    out = into_workdir.check(str(tmp_path / "out"))
    with pytest.raises(UserError, match="cannot be written: No space left on device; nothing"):
        into_workdir.write(source, out, {})
    assert not list(tmp_path.iterdir())
