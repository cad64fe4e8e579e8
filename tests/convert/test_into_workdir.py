"""The workdir of a conversion: complete or absent, and ready for fine-tuning."""

import pytest

from kvjax import recipes
from kvjax.convert import into_workdir, model as model_lib
from kvjax.decoding.generator import Generator
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained


def test_recovery_config_errors(imported, tmp_path):
    with pytest.raises(UserError, match="section = 'trian': must be one of"):
        recipes.recover(imported("gpt2"), trian=dict(num_steps=1))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no workdir of a model .config.json has no 'model'"):
        recipes.recover(tmp_path)


def test_a_link_is_followed(imported, tmp_path):
    source = model_lib.open(str(imported("llama_tied_bias")))
    for target in ("empty", "missing"):
        (tmp_path / f"{target}_link").symlink_to(tmp_path / target)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "missing"):
        into_workdir.write(source, into_workdir.check(str(tmp_path / f"{target}_link")), {})
        assert (tmp_path / target / "config.txt").exists()
        assert (tmp_path / f"{target}_link").is_symlink()


def test_what_was_made_is_kept_where_its_name_was_taken_meanwhile(imported, tmp_path):
    source = model_lib.open(str(imported("llama_tied_bias")))
    out = into_workdir.check(str(tmp_path / "model.v1"))
    with pytest.raises(UserError, match=r"was created meanwhile; the result is .*model.v1-3$"):
        with into_workdir.staged(out) as staging:
            (staging / "weights").write_text("all")
            (tmp_path / "model.v1-2").write_text("")
            (tmp_path / "model.v1").mkdir()
            (tmp_path / "model.v1/theirs").write_text("")
    assert (tmp_path / "model.v1-3/weights").read_text() == "all"
    names = ["model.v1", "model.v1-2", "model.v1-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    into_workdir.write(source, into_workdir.check(str(tmp_path / "other")), {})


def test_nothing_half_written_has_the_name(imported, tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_generation_from_a_conversion(imported):
    loaded = trained.load(imported("llama_tied_bias"))
    generation = Generator(loaded.model, loaded.compute).start([[1, 2, 3]], num_tokens=4)
    assert len(list(generation)) == 4
    assert len(generation.tokens[0]) == 4
