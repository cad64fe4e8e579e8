"""A workdir belongs to one process at a time, one config, one data set."""

import functools
import json
import shutil
import types

from etils import epath
import jax
import jax.numpy as jnp
import pytest

from kvjax import config as config_lib, recipes
from kvjax.data import loader, manifest, tokenizer as tokenizer_lib
from kvjax.foundation.configuration import to_text
from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.workdir import identity, trained
from tests import runs


def test_the_lock_is_released(tmp_path):
    workdir = epath.Path(tmp_path)
    with (
        identity.exclusive(workdir),
        pytest.raises(UserError, match="in use by another run"),
        identity.exclusive(workdir),
    ):
        pass
    with identity.exclusive(workdir):
        assert (tmp_path / ".lock").exists()


def test_identity_ignores_neutral_keys_only(source):
    def identity_of(config, dtype="float32"):
        return identity.identity(config, jnp.dtype(dtype))

    base = identity_of(runs.small_config(*source))
    neutral = dict(log_every=3, eval_every=7, checkpoint_every=5, keep_checkpoints=1, stop_after=5)
    neutral |= dict(max_bad_steps=2, sample_prompt="a", sample_tokens=2)
    assert identity_of(runs.small_config(*source, **neutral)) == base
    assert identity_of(runs.small_config(*source, seed=1)) != base
    assert identity_of(runs.small_config(*source, eval_rows=1)) != base
    json.dumps(base)
    config = runs.small_config(*source)
    config.mesh.fsdp = 4
    config.compute.update(attention="xla", remat="full")
    config.train.grad_accumulation = 2  # as fewer chips need
    assert identity_of(config) == base
    assert identity_of(config, "bfloat16") != base  # what "auto" is elsewhere
    config.compute.dtype = "float32"  # what it is here
    assert identity_of(config) == base


def test_removed_keys_of_old_workdirs_are_read_at_their_defaults(tmp_path):
    attention = recipes.tpa(2, key_rank=1, value_rank=1, head_dim=16)
    config = recipes.pretrain("old", scale="tiny", attention=attention)
    workdir, dtype = epath.Path(tmp_path), jnp.dtype("float32")
    (workdir / "checkpoints" / "10").mkdir(parents=True)
    tree = identity.identity(config, dtype)
    tree["attention"] |= dict(fixed="none", shared_factors=False, factor_init="linear")
    identity.write_identity(workdir / "config.json", tree)
    assert trained.experiment_of(workdir).model == config_lib.resolve(config).model
    identity.check_config(workdir, config, dtype)
    tree["attention"]["fixed"] = "heads"
    identity.write_identity(workdir / "config.json", tree)
    assert _message(trained.experiment_of, workdir) == (
        f"{workdir}/config.json: config.attention.fixed = 'heads': the key was removed, and with "
        "it every value but 'none'; leave it out"
    )
    message = _message(identity.check_config, workdir, config, dtype)
    assert "attention.fixed: there 'heads', now None" in message


def _message(check, *arguments) -> str:
    with pytest.raises(UserError) as error:
        check(*arguments)
    return str(error.value)


def test_a_resumed_run_keeps_its_identity(source, tmp_path, capsys):
    """A resumed run keeps config, dtype, rows and tokenizer; paths of its data may change."""
    workdir, wide = epath.Path(tmp_path / "run"), jnp.dtype("float32")
    tokenizer = tokenizer_lib.byte_tokenizer()
    other = tokenizer.with_specials(["<|end|>"])
    data = types.SimpleNamespace(path=tmp_path / "one", digest="abc", tokenizer=tokenizer)
    config = runs.small_config(*source)
    workdir.mkdir()
    (workdir / "tokenizer.json").write_text("{}")  # of a start without a checkpoint
    identity.write_run_identity(workdir, config, wide, data)
    of_other = types.SimpleNamespace(**vars(data) | dict(tokenizer=other))
    identity.check_data(workdir, of_other)  # no checkpoint yet
    (workdir / "checkpoints" / "10").mkdir(parents=True)
    before = claims(workdir)
    assert before["tokenizer.json"] == tokenizer.to_json()
    assert before["dataset.json"] == '{\n "dataset": "abc"\n}\n'
    assert json.loads(before["config.json"]) == json.loads(
        json.dumps(identity.identity(config, wide))
    )
    assert before["config.txt"] == to_text(config)
    moved = types.SimpleNamespace(**vars(data) | dict(path=tmp_path / "two"))
    for _ in range(2):
        identity.check_config(workdir, config, wide)
        identity.check_data(workdir, moved)
        identity.write_run_identity(workdir, config, wide, of_other)
        assert claims(workdir) == before  # a tokenizer that weights belong to stays

    holds = f"{workdir} holds another run:\n"
    new = ", or another --workdir for a new run"
    config.model.num_layers = 3
    assert _message(identity.check_config, workdir, config, jnp.dtype("bfloat16")) == (
        f"{holds}  compute.dtype: there 'float32', now 'bfloat16'\n"
        "  model.num_layers: there 2, now 3\n"
        "Give the same values to resume it (and a dtype, since --config.compute.dtype=auto "
        f"depends on the platform){new}"
    )
    other_rows = types.SimpleNamespace(**vars(data) | dict(digest="abd"))
    assert _message(identity.check_data, workdir, other_rows) == (
        f"{holds}  dataset: there 'abc', now 'abd'\n"
        f"The run was trained on other rows or another tokenizer than in {other_rows.path}: give "
        f"the same data to resume it{new}"
    )
    start = f"{workdir}/tokenizer.json is not the tokenizer of {of_other.path}: give the data"
    assert _message(identity.check_data, workdir, of_other).startswith(start)
    identity.write_identity(workdir / "dataset.json", dict(dataset="one"))  # as older workdirs
    identity.check_data(workdir, data)
    assert "there 'one', now 'abc'" in _message(identity.check_data, workdir, moved)

    # Older workdirs store an unresolved dtype, and lack newer keys.
    stored = json.loads(before["config.json"])
    config.model.num_layers = 2
    stored["compute"]["dtype"] = "auto"
    del stored["train"]["seed"], stored["optimizer"]["tuned"]
    stored["data"]["source"], config.data.source = "prepared:/there", "prepared:/here"
    identity.write_identity(workdir / "config.json", stored)
    assert not capsys.readouterr().err
    identity.check_config(workdir, config, wide)
    assert capsys.readouterr().err == (
        f"WARNING: {workdir} does not say in which dtype it was trained: the run goes on in "
        "float32 (set another with --config.compute.dtype)\n"
    )
    config.train.seed += 1
    config.data.source = source[0]
    assert _message(identity.check_config, workdir, config, wide).startswith(
        f"{holds}  data.source: there 'prepared:/there', now {source[0]!r}\n"
        f"  train.seed: there None, now {config.train.seed}\nGive"
    )
    identity.write_identity(workdir / "x.json", {f"{i:02}": i for i in range(14)})
    rows = "".join(f"  {i:02}: there {i}, now None\n" for i in range(12))
    last = f"  and 2 more\nGive the same values to resume it{new}"
    assert _message(identity.check_identity, workdir / "x.json", {}) == holds + rows + last
    identity.write_identity(workdir / "x.json", {f"{i:02}": i for i in range(12)})
    assert "more" not in _message(identity.check_identity, workdir / "x.json", {})


def claims(workdir) -> dict[str, str]:
    names = ("config.json", "config.txt", "dataset.json", "tokenizer.json")
    return {name: (workdir / name).read_text() for name in names}


@pytest.fixture
def prepared(source, tmp_path):
    """Returns a function of a text's name to a folder of its prepared rows, of 272 tokens."""
    return functools.partial(runs.prepare_text, source[0], tmp_path)


@pytest.mark.slow
def test_prepared_rows_may_move_and_not_change(source, tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
    workdir, one, two = epath.Path(tmp_path / "run"), tmp_path / "one", tmp_path / "two"

    def go_on(folder, stop_after=10):
        config = runs.small_config(f"prepared:{folder}", "", stop_after=stop_after)
        config.data.update(vocab_size=272, tokenizer="bpe")
        loop.train(config, workdir)

    shutil.copytree(prepared("xylophone"), one)
    go_on(one)
    one.rename(two)
    go_on(two, stop_after=20)
    assert (workdir / "checkpoints" / "20").exists() and str(two) in claims(workdir)["config.json"]

    before = claims(workdir)
    digest = json.loads(before["dataset.json"])["dataset"]
    other = loader.open_dataset(prepared("zebra"))
    assert other.digest != digest == loader.open_dataset(two).digest
    shutil.copytree(other.path, one)
    two.rename(tmp_path / "three")
    shutil.copytree(other.path, two)
    with pytest.raises(UserError, match="trained on other rows or another tokenizer than in"):
        go_on(two, stop_after=30)
    assert claims(workdir) == before and not (workdir / "checkpoints" / "30").exists()
    shutil.rmtree(two)
    (tmp_path / "three").rename(two)
    go_on(two, stop_after=20)
    assert claims(workdir) == before


def test_the_digest_covers_rows(tmp_path, prepared):
    one, two = prepared("xylophone"), prepared("xenon")  # the same words in another order
    before = loader.open_dataset(one).digest
    copy = shutil.copytree(one, tmp_path / "copy")
    assert loader.open_dataset(copy).digest == before
    shutil.rmtree(copy / manifest.ROWS)
    shutil.copytree(two / manifest.ROWS, copy / manifest.ROWS)
    changed = loader.open_dataset(copy)
    assert changed.tokenizer.vocabulary() == loader.open_dataset(one).tokenizer.vocabulary()
    assert changed.digest != before


def test_an_identity_binds_only_where_there_are_checkpoints(tmp_path):
    """Files of a killed first save are no checkpoint."""
    path = epath.Path(tmp_path) / "config.json"
    (path.parent / "checkpoints" / "10.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    identity.write_identity(path, {"rank": 16})
    identity.check_identity(path, {"rank": 8})
    (path.parent / "checkpoints" / "10").mkdir()
    assert "rank: there 16, now 8" in _message(identity.check_identity, path, {"rank": 8})
    path.unlink()
    assert "has checkpoints, but no config.json" in _message(identity.check_identity, path, {})


def leave_a_run(workdir: epath.Path) -> dict[str, str]:
    """Writes a run's files with their names as content."""
    files = ["config.json", "dataset.json", "metrics.jsonl", "timing.jsonl", "events/events.1"]
    files += ["chat_template.jinja", "context.json"]  # of what it started from
    files += ["wandb/run", "profile/trace", "trackers.json"]
    for folder in ("events", "wandb", "profile"):
        (workdir / folder).mkdir(parents=True, exist_ok=True)
    for name in files:
        (workdir / name).write_text(name)
    return {name: name for name in files}


@pytest.mark.parametrize("where", ["local", "gs://"])
def test_a_run_without_checkpoints_is_set_aside(tmp_path, bucket, capsys, where):
    (bucket / "runs").mkdir()
    workdir = epath.Path("gs://runs/one") if where == "gs://" else epath.Path(tmp_path) / "one"
    workdir.mkdir()
    identity.set_aside_earlier_run(workdir)
    assert not capsys.readouterr().err
    files = leave_a_run(workdir)
    (workdir / "mine.txt").write_text("notes")
    for number in ("", "-2"):
        identity.set_aside_earlier_run(workdir)
        target = workdir / f"earlier-run{number}"
        assert {name: (target / name).read_text() for name in files} == files
        assert capsys.readouterr().err.startswith(f"WARNING: {workdir} has records of a run")
        identity.set_aside_earlier_run(workdir)  # nothing is left to move
        assert not capsys.readouterr().err and (workdir / "mine.txt").exists()
        leave_a_run(workdir)


def test_nothing_of_a_run_with_checkpoints_is_moved(tmp_path):
    workdir = epath.Path(tmp_path)
    (workdir / "checkpoints" / "3").mkdir(parents=True)
    files = leave_a_run(workdir)
    identity.set_aside_earlier_run(workdir)
    assert {name: (workdir / name).read_text() for name in files} == files
