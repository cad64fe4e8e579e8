"""A workdir keeps copies of its parent's files and a hash of its parent's parameters."""

import hashlib
import json

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.data import tokenizer
from kvjax.foundation.errors import UserError
from kvjax.workdir import lineage, origin
from kvjax.workdir.checkpoint import CHECKPOINTS, Checkpoints

FILES = {
    "chat_template.jinja": "{{ messages }}",
    "tokenizer_config.json": json.dumps(dict(eos_token="a")),
    "generation_config.json": json.dumps(dict(eos_token_id=7)),
}


@pytest.fixture
def folders(tmp_path):
    """A parent with all files, and a run's workdir."""
    parent, run = epath.Path(tmp_path / "parent"), epath.Path(tmp_path / "run")
    for folder in (parent, run):
        folder.mkdir()
    for name, text in FILES.items():
        (parent / name).write_text(text)
    return parent, run


def test_files_are_copied_as_they_are(folders):
    parent, run = folders
    origin.inherit(run, parent, context=64)
    assert {name: (run / name).read_text() for name in FILES} == FILES
    assert [origin.context(run, row) for row in (16, 64, 128)] == [64, 64, 128]


def test_copies_of_an_earlier_run_are_removed(folders):
    """A second start, from a parent with fewer files or from none, leaves no earlier copy."""
    parent, run = folders
    origin.inherit(run, parent, context=64)
    (parent / "chat_template.jinja").unlink()
    origin.inherit(run, parent, context=32)
    assert not (run / "chat_template.jinja").exists() and origin.context(run, 8) == 32
    origin.inherit(run, None)
    assert not list(run.iterdir()) and origin.context(run, 8) == 8


def test_files_of_the_user_stay(folders, capsys):
    """Files of the user survive starts from any parent, repeated or not."""
    parent, run = folders
    own = {"chat_template.jinja": "mine", "generation_config.json": '{"eos_token_id": 8}'}
    for name, text in own.items():
        (run / name).write_text(text)
    origin.inherit(run, None)
    assert {path.name: path.read_text() for path in run.iterdir()} == own
    for _ in range(2):
        origin.inherit(run, parent, context=64)
        assert {name: (run / name).read_text() for name in FILES} == FILES | own
        warnings = capsys.readouterr().err
        assert (
            warnings.count("was left as it is") == 2
            and f"{run / 'chat_template.jinja'}" in warnings
        )
    (parent / "generation_config.json").unlink()
    origin.inherit(run, parent, context=64)
    origin.inherit(run, None)
    assert {path.name: path.read_text() for path in run.iterdir()} == own


def test_a_copy_of_the_parents_file_gives_no_warning(folders, capsys):
    parent, run = folders
    (run / "chat_template.jinja").write_text(FILES["chat_template.jinja"])
    origin.inherit(run, parent, context=64)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"context": 64}', '{"context": 64, "files": 3}'])
def test_a_context_without_files(folders, text):
    _, run = folders
    (run / "context.json").write_text(text)
    (run / "chat_template.jinja").write_text("mine")
    origin.inherit(run, None)
    assert [path.name for path in run.iterdir()] == ["chat_template.jinja"]


def test_ends_are_in_the_vocabulary():
    byte = tokenizer.byte_tokenizer()

    def ends_of(ids, text):
        return origin.ends(
            {
                "generation_config.json": dict(eos_token_id=ids),
                "tokenizer_config.json": dict(eos_token=text),
            },
            byte,
            300,
        )

    assert origin.ends({}, byte, 300) == ()
    assert ends_of(299, None) == (299,) and ends_of(300, None) == ()
    assert ends_of([256, 7, -1, "8", True, None, 9.0], "<none>") == (7, 256)
    assert ends_of(None, "a") == (97,) and ends_of("no", dict(content="a")) == ()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("3", "is not a JSON object: restore it, or remove it"),
        ("{}", ": context = None is a NoneType; it must be"),
        ('{"context": "8"}', ": context = '8' is a str"),
        ('{"context": 0}', ": context = 0: must be at least 1"),
    ],
)
def test_a_context_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "context.json").write_text(text)
    with pytest.raises(UserError) as error:
        origin.context(epath.Path(tmp_path), 8)
    assert str(error.value).startswith(str(tmp_path / "context.json")) and message in str(
        error.value
    )


def test_a_parent_is_identified_by_its_parameters(tmp_path, monkeypatch):
    """The hash depends on neither other arrays nor the size of reads."""
    workdir = epath.Path(tmp_path)
    params = {"w": np.arange(15.0, dtype=np.float32).reshape(5, 3), "a": {"s": np.float32(7)}}
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=1)
    checkpoints.save(4, dict(params=jax.tree.map(jnp.asarray, params), n=jnp.ones(2)), position=0)
    checkpoints.close()
    digest = hashlib.sha256(b"params.a.s () float32\n" + params["a"]["s"].tobytes())
    digest.update(b"params.w (5, 3) float32\n" + params["w"].tobytes())
    for block in (1, 24, 1 << 28):
        monkeypatch.setattr(lineage, "_READ_BYTES", block)
        lineage.write(workdir, epath.Path("/parent"), workdir / CHECKPOINTS, 4)
        text = (workdir / lineage.PARENT).read_text()
        expected = dict(workdir="/parent", step=4, sha256=digest.hexdigest())
        assert text == json.dumps(expected, indent=1) + "\n"
    for _ in range(2):
        lineage.remove(workdir)
        assert not (workdir / lineage.PARENT).exists()
