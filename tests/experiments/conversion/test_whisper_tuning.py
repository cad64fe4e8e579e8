"""Tuning of Whisper's decoder: trained parameters, rows, seeds."""

from flax import traverse_util
import numpy as np
import pytest

from experiments.conversion import curves, records, whisper as whisper_lib, whisper_tuning
from experiments.conversion.whisper_tuning import Setting
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.foundation import record_lines

pytestmark = pytest.mark.usefixtures("small")


def _settings(monkeypatch, *variants):
    one = Setting(1e-3, "qkv", 0.0, ("control", *variants))
    monkeypatch.setattr(whisper_tuning.tasks, "__kwdefaults__", dict(settings=(one,)))


def _tune(subject, setting, methods=(), steps=3, **keys):
    params, mechanisms, _ = subject.converted(methods)
    rows_SBT = subject.training_RT[: 2 * steps].reshape(steps, 2, -1)
    config = whisper_tuning.optimizer(setting)
    first = len(subject.whisper.prefix)
    keys |= dict(share=setting.teacher_share)
    return (
        params,
        mechanisms,
        whisper_tuning.tune(params, mechanisms, rows_SBT, config, first=first, **keys),
    )


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["qk", "qkv"])
def test_only_named_parameters_are_trained(subject, tune):
    setting = Setting(1e-2, tune, 0.0, ())
    before, mechanisms, (after, losses, count) = _tune(subject, setting, (LowRankKV(rank=2),))
    rows_RT = subject.training_RT[:2]
    nats_RT = whisper_lib.losses(before, mechanisms, rows_RT)[:, 1:]  # behind the prefix
    assert losses[0] == pytest.approx(nats_RT.mean(), rel=1e-4)

    def flat(tree):
        return {
            ".".join(map(str, path)): np.asarray(x)
            for path, x in traverse_util.flatten_dict(tree).items()
        }

    def tree(params):
        return params | dict(layers=dict(enumerate(params["layers"])))

    old, new = flat(tree(before)), flat(tree(after))
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    wanted = {name for name in old if ".attention.mechanism." in name}
    if tune == "qk":
        wanted = {name for name in wanted if "value" not in name}
    assert changed == wanted
    assert count == sum(old[name].size for name in wanted)


@pytest.mark.slow
def test_a_share_of_the_loss_is_the_originals_predictions(subject):
    teacher, thin = (subject.whisper.params, subject.mechanisms), (ThinKeys(rank=1),)

    def first_loss(share, methods=thin, **keys):
        return _tune(subject, Setting(1e-3, "qkv", share, ()), methods, **keys)[2][1][0]

    assert abs(first_loss(1.0, (), teacher=teacher)) < 1e-6  # the model is its own teacher
    divergence, nats = first_loss(1.0, teacher=teacher), first_loss(0.0)
    assert divergence > 1e-3
    mixed = first_loss(0.5, teacher=teacher)
    assert mixed == pytest.approx((divergence + nats) / 2, rel=1e-4)


@pytest.mark.slow
def test_runs_of_a_seed_see_the_same_rows(subject, monkeypatch):
    seen = {}
    _settings(monkeypatch, "lrkv_r32")
    tasks = whisper_tuning.tasks(subject, tokens=48, seeds=2)
    assert len(tasks) == 4
    for task in tasks:

        def tune(params, mechanisms, rows_SBT, *_, name=task.name, **__):
            seen.setdefault(name.rpartition("/")[2], rows_SBT.tolist())
            return params, [], 0

        monkeypatch.setattr(whisper_tuning, "tune", tune)
        task.make()
    assert seen["control_seed0"] == seen["lrkv_r32_seed0"] != seen["control_seed1"]
    assert seen["control_seed1"] == seen["lrkv_r32_seed1"]
    assert np.shape(seen["control_seed0"]) == (2, 2, 14)  # steps, rows, tokens and the prefix


def test_variants_have_the_bytes_they_are_named_for():
    """Elements of the cache per token, for the heads of Whisper tiny.en."""
    made = whisper_tuning.variants(6, 64)
    (mechanism,) = set(
        whisper_lib.WhisperConfig(
            num_layers=1, num_heads=6, d_model=384, mlp_dim=1, vocab_size=1, max_positions=1
        ).mechanisms
    )

    def elements(name):
        found = mechanism
        for method in made[name]:
            found = method.mechanism(found, rope=False)
        return curves.cached([found])

    assert elements("control") == 768
    assert [elements(f"thin_r{rank}") for rank in whisper_tuning.THIN] == [576, 510, 480, 444]
    assert [elements(f"thin_joint_r{rank}") for rank in whisper_tuning.JOINT] == [480, 448]
    for rank in whisper_tuning.RESIDUAL_RANKS:
        ours = elements(f"lrkv_r{rank}")
        assert ours == 2 * (64 + 6 * rank)
        assert elements(f"thin_kv_joint_as_lrkv_r{rank}") == ours
        for name in (f"thin_as_lrkv_r{rank}", f"thin_kv_as_lrkv_r{rank}"):
            if name in made:
                assert 0.96 * ours < elements(name) <= ours
    for setting in whisper_tuning.SETTINGS:
        assert setting.variants[0] == "control" and set(setting.variants) <= set(made)


@pytest.mark.slow
def test_whisper_is_tuned_once_for_each_seed(run, monkeypatch):
    _settings(monkeypatch, "lrkv_r32")
    options = ("--stage=whisper_tuning", "--whisper=folder", "--tokens=72", "--seeds=2")
    assert run(*options)[0] == 0
    found = records.in_folder("whisper/after")
    folder = "whisper/after/qkv_text_rate0.001"
    assert list(found) == [f"{folder}/{v}_seed{s}" for v in ("control", "lrkv_r32") for s in (0, 1)]
    one = found[f"{folder}/lrkv_r32_seed1"]
    assert len(one["losses"]) == 3 and one["settings"]["steps"] == 3
    assert one["share"] == 20 / 24 and one["methods"][0]["method"] == "LowRankKV"
    assert one["before"] != one["after"] != found[f"{folder}/lrkv_r32_seed0"]["after"]
    assert one["before"] == found[f"{folder}/lrkv_r32_seed0"]["before"]

    record_lines.put(records.file(), f"{folder}/control_seed0", None)
    status, _, err = run(*options)  # the program is still there
    assert status == 0 and "1 of 4 results to make" in err
    assert (
        records.read(f"{folder}/control_seed0")["after"]
        == found[f"{folder}/control_seed0"]["after"]
    )
