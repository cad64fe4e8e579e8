"""The conversion studies on small models of random weights: each stage, its files, the report."""

import dataclasses
import json
import pathlib
import zlib

from etils import epath
from flax import traverse_util
import numpy as np
import pytest

from experiments import record
from experiments.conversion import curves
from experiments.conversion import kept
from experiments.conversion import outcomes as outcomes_lib
from experiments.conversion import plots
from experiments.conversion import smollm2
from experiments.conversion import tables
from experiments.conversion import texts
from experiments.conversion import whisper as whisper_lib
from experiments.conversion import whisper_converted
from experiments.conversion import whisper_tuning
from experiments.conversion.whisper_tuning import Setting
from experiments.studies import conversion
from kvjax.attention import GroupedConfig
from kvjax.convert import into_workdir
from kvjax.convert import model as model_lib
from kvjax.convert.methods import LowRankKV
from kvjax.convert.methods import ThinKeys
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from tests import runs
from tests.experiments import whisper_stand_in as stand_in

SIZES = whisper_converted.Sizes(row_length=12, validation_rows=3, calibration_rows=20)
WORDS = "the king and the queen of all that is "


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Results go to a temporary folder; ranks and texts fit the stand-ins."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(whisper_converted, "RANKS", (6, 9))
    monkeypatch.setattr(whisper_converted, "RESIDUAL_RANKS", (0, 2))
    monkeypatch.setattr(whisper_tuning, "BATCH", 2)
    monkeypatch.setattr(texts, "training_text", lambda: [WORDS * 40, WORDS[::-1] * 20])
    monkeypatch.setattr(texts, "validation_text", lambda: [WORDS[10:] * 9])


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    stand_in.write(folder)
    return folder


@pytest.fixture(scope="module")
def subject(whisper_folder):
    """A Whisper of 2 layers, 3 heads of 4."""
    return whisper_converted.Subject(whisper_folder, SIZES)


@pytest.fixture
def run(subject, monkeypatch, capsys):
    """A function of the study's options: status, standard output, standard error."""
    monkeypatch.setattr(conversion, "_whisper", lambda options: subject)

    def run(*options):
        status = command_line.status(conversion.main, options)
        return status, *capsys.readouterr()

    return run


def _settings(monkeypatch, *variants):
    one = Setting(1e-3, "qkv", 0.0, ("control", *variants))
    monkeypatch.setattr(whisper_tuning.tasks, "__kwdefaults__", dict(settings=(one,)))


# -- converting ------------------------------------------------------------------------------------


def test_moments_are_those_of_the_inputs(subject):
    whisper = subject.whisper
    rows_RT = subject.training_RT[:20]
    found = whisper_converted.moments(whisper.params, subject.mechanisms, rows_RT)
    inputs = whisper_lib.attention_inputs(whisper.params, subject.mechanisms, rows_RT)
    for moment_EE, x_BTD in zip(found, inputs, strict=True):
        x_SE = np.concatenate([x_BTD, np.ones_like(x_BTD[..., :1])], -1).reshape(rows_RT.size, -1)
        np.testing.assert_allclose(moment_EE, x_SE.T @ x_SE / rows_RT.size, rtol=1e-4, atol=1e-4)
        assert np.linalg.eigvalsh(moment_EE)[0] > -1e-12  # LRKV takes its root


@pytest.mark.parametrize(
    "methods",
    [
        (ThinKeys(rank=4),),
        (ThinKeys(rank=12, mode="joint"),),
        (LowRankKV(rank=4),),
        curves.keys_and_values(4, "outputs"),
        curves.keys_and_values(4, "weights"),
    ],
    ids=str,
)
def test_full_rank_is_the_original(subject, methods):
    measured = subject.measure(methods)
    assert measured.perplexity == pytest.approx(subject.measure(()).perplexity, rel=1e-4)
    assert all(lost < 1e-9 for errors in measured.errors for lost in errors.values())


def test_methods_in_turn_make_both_thin(subject):
    params, mechanisms, errors = subject.converted(curves.keys_and_values(2, "outputs"))
    assert curves.cached(mechanisms) == 2 * 3 * (2 + 2) and len(errors) == 2
    assert curves.cached(subject.mechanisms) == 2 * 3 * (4 + 4)
    assert set(errors[0]) == {"key", "value"} and all(0 < x < 1 for x in errors[0].values())
    keys_alone, _, _ = subject.converted(curves.keys_and_values(2, "outputs")[:1])
    for both, one in zip(params["layers"], keys_alone["layers"], strict=True):
        inner, expected = both["attention"]["mechanism"], one["attention"]["mechanism"]
        logits = lambda w, key: np.einsum("DNR,ENR->NDE", w["query"], w[key])
        np.testing.assert_allclose(
            logits(inner, "base_key"), logits(expected, "base_key"), rtol=1e-3, atol=1e-4
        )


def test_rows_are_spread():
    rows_RT = np.arange(10)[:, None]
    assert whisper_converted.spread(rows_RT, 3)[:, 0].tolist() == [0, 3, 6]
    assert len(whisper_converted.spread(rows_RT, 99)) == 10


# -- tuning ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("tune", ["qk", "qkv"])
def test_what_is_named_learns_and_nothing_else(subject, tune):
    setting = Setting(1e-2, tune, 0.0, ())
    before, mechanisms, (after, losses, count) = _tune(subject, setting, (LowRankKV(rank=2),))
    rows_RT = subject.training_RT[:2]
    nats_RT = whisper_lib.losses(before, mechanisms, rows_RT)[:, 1:]  # behind the prefix
    assert losses[0] == pytest.approx(nats_RT.mean(), rel=1e-4)
    flat = lambda tree: {
        ".".join(map(str, path)): np.asarray(x)
        for path, x in traverse_util.flatten_dict(tree).items()
    }
    tree = lambda params: params | dict(layers=dict(enumerate(params["layers"])))
    old, new = flat(tree(before)), flat(tree(after))
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    wanted = {name for name in old if ".attention.mechanism." in name}
    if tune == "qk":
        wanted = {name for name in wanted if "value" not in name}
    assert changed == wanted
    assert count == sum(old[name].size for name in wanted)


def test_the_originals_predictions_are_learned(subject):
    setting = Setting(1e-3, "qkv", 1.0, ())
    teacher = (subject.whisper.params, subject.mechanisms)
    _, _, (_, losses, _) = _tune(subject, setting, teacher=teacher)
    assert abs(losses[0]) < 1e-6  # it is its own teacher
    _, _, (_, losses, _) = _tune(subject, setting, (ThinKeys(rank=1),), teacher=teacher)
    assert losses[0] > 1e-3
    half = dataclasses.replace(setting, teacher_share=0.5)
    _, _, (_, mixed, _) = _tune(subject, half, (ThinKeys(rank=1),), teacher=teacher)
    text = dataclasses.replace(setting, teacher_share=0.0)
    _, _, (_, nats, _) = _tune(subject, text, (ThinKeys(rank=1),))
    assert mixed[0] == pytest.approx((losses[0] + nats[0]) / 2, rel=1e-4)


def test_all_of_a_seed_see_the_same_rows(subject, monkeypatch):
    seen = {}
    _settings(monkeypatch, "lrkv_r32")
    tasks = whisper_tuning.tasks(subject, tokens=48, seeds=2)
    assert len(tasks) == 4
    for task in tasks:
        tune = lambda params, mechanisms, rows_SBT, *_, name=task.name, **__: (
            seen.setdefault(name.rpartition("/")[2], rows_SBT.tolist()) and (params, [], 0)
        )
        monkeypatch.setattr(whisper_tuning, "tune", tune)
        task.make()
    assert seen["control_seed0"] == seen["lrkv_r32_seed0"] != seen["control_seed1"]
    assert seen["control_seed1"] == seen["lrkv_r32_seed1"]
    assert np.shape(seen["control_seed0"]) == (2, 2, 14)  # steps, rows, tokens and the prefix


def test_variants_have_the_bytes_they_are_named_for():
    """Of Whisper tiny.en's heads."""
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
        for name in (f"thin_as_lrkv_r{rank}", f"thin_kv_as_lrkv_r{rank}"):
            if name in made:
                assert 0.96 * ours < elements(name) <= ours
    for setting in whisper_tuning.SETTINGS:
        assert setting.variants[0] == "control" and set(setting.variants) <= set(made)


# -- stages ----------------------------------------------------------------------------------------


def test_ranks_of_whisper_are_measured_once(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder")
    status, out, err = run(*options, "--plan")
    assert status == 0 and not out and "whisper_ranks: 28 of 28 files to make, about" in err
    assert not list(record.RESULTS.rglob("*.json"))
    status, _, err = run(*options, "--only=whisper/before/[lo]*")
    assert status == 0 and "4 of 4 files to make" in err
    found = kept.named("whisper/before")
    names = ("lrkv_outputs", "lrkv_outputs_not_aligned", "lrkv_weights", "original")
    assert tuple(found) == tuple(f"whisper/before/{name}" for name in names)
    original, curve = found["whisper/before/original"], found["whisper/before/lrkv_outputs"]
    assert original["perplexity"] == subject.measure(()).perplexity and original["share"] == 1
    assert curve["settings"] == dataclasses.asdict(SIZES) and curve["made_by"]["packages"]["jax"]
    assert [point["rank"] for point in curve["points"]] == [0, 2]
    assert [point["cached"] for point in curve["points"]] == [2 * 8, 2 * 20]
    assert curve["points"][1]["perplexity"] == subject.measure((LowRankKV(rank=2),)).perplexity

    made = []
    monkeypatch.setattr(subject, "measure", lambda methods: made.append(methods))
    monkeypatch.setattr(curves, "point", lambda *_: {})
    kept.file("whisper/before/lrkv_weights").unlink()
    status, _, err = run(*options, "--only=whisper/before/[lo]*")
    assert status == 0 and "1 of 4 files to make" in err
    assert [[method.objective for method in methods] for methods in made] == [["weights"]] * 2


def test_other_settings_are_refused(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder", "--only=*/original")
    assert run(*options)[0] == 0
    monkeypatch.setattr(subject, "sizes", dataclasses.replace(SIZES, validation_rows=9))
    status, _, err = run(*options)
    assert status == 2
    assert "original.json: was made with validation_rows = 3 (now 9); give the same, or" in err


def test_a_failure_is_written_down_and_tried_again(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder", "--only=*/original")

    def fail(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(subject, "measure", fail)
        status, _, err = run(*options)
    assert status == 1 and "1 of 1 failed" in err
    assert kept.failed("whisper") == {"whisper/before/original": "MemoryError: no room"}
    assert kept.read("whisper/before/original") is None
    assert any("no room" in str(table.rows) for table in tables.report().tables)
    assert run(*options)[0] == 0 and not kept.failed("")


def test_whisper_is_tuned_once_for_each_seed(run, monkeypatch):
    _settings(monkeypatch, "lrkv_r32")
    options = ("--stage=whisper_tuning", "--whisper=folder", "--tokens=72", "--seeds=2")
    assert run(*options)[0] == 0
    found = kept.named("whisper/after")
    folder = "whisper/after/qkv_text_rate0.001"
    assert list(found) == [f"{folder}/{v}_seed{s}" for v in ("control", "lrkv_r32") for s in (0, 1)]
    one = found[f"{folder}/lrkv_r32_seed1"]
    assert len(one["losses"]) == 3 and one["settings"]["steps"] == 3
    assert one["share"] == 20 / 24 and one["methods"][0]["method"] == "LowRankKV"
    assert one["before"] != one["after"] != found[f"{folder}/lrkv_r32_seed0"]["after"]
    assert one["before"] == found[f"{folder}/lrkv_r32_seed0"]["before"]

    kept.file(f"{folder}/control_seed0").unlink()
    status, _, err = run(*options)  # the program is still there
    assert status == 0 and "1 of 4 files to make" in err
    assert (
        kept.read(f"{folder}/control_seed0")["after"] == found[f"{folder}/control_seed0"]["after"]
    )


class _Random:
    """A GQA model with RoPE of random weights, as `kvjax.convert.model.Model` asks for."""

    name, context, chat_template = "small", 32, None
    transformer = TransformerConfig(
        block=BlockConfig(num_layers=2, d_model=16, mlp_dim=24, positions="rope"),
        mechanisms=(
            GroupedConfig(
                **dict(num_heads=4, num_kv_heads=2, num_bases=2, rank=0),
                **dict(key_dim=4, value_dim=4, qk_norm="none"),
            ),
        )
        * 2,
        vocab_size=257,
    )

    def __init__(self, folder):
        tokenizer_lib.train(["some text"], 257).save(folder / "tokenizer.json")
        self.tokenizer_json = (folder / "tokenizer.json").read_text()

    def parameters(self):
        shapes = model_lib.shapes_of(self.transformer)
        return {path: (shape, np.dtype(np.float32)) for path, shape in shapes.items()}

    def read(self, path, layer=None):
        shape = self.parameters()[path][0][0 if layer is None else 1 :]
        rng = np.random.default_rng(zlib.crc32(repr((path, layer)).encode()))
        return (rng.standard_normal(shape) / 3).astype(np.float32)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """That model as a workdir, and its text."""
    folder = tmp_path_factory.mktemp("smollm2")
    into_workdir.write(_Random(folder), epath.Path(folder / "model"), {})
    return folder / "model", runs.write_text(folder / "text.txt")


@pytest.fixture
def small_smollm2(workdir, monkeypatch):
    """The options that name it."""
    folder, text = workdir
    monkeypatch.setattr(smollm2, "TEXT", text)
    monkeypatch.setattr(smollm2, "ROW_LENGTH", 16)
    monkeypatch.setattr(smollm2, "CALIBRATION_TOKENS", 64)
    monkeypatch.setattr(smollm2, "RANKS", (2,))
    monkeypatch.setattr(smollm2, "RESIDUAL_RANKS", (2,))
    variants = dict(control=(), thin_r2=(ThinKeys(rank=2),), lrkv_r2=(LowRankKV(rank=2),))
    monkeypatch.setattr(smollm2, "TUNED", variants)
    return f"--smollm2={folder}", "--validation_tokens=32"


def test_ranks_of_smollm2(run, small_smollm2):
    status, _, err = run("--stage=smollm2_ranks", *small_smollm2, "--only=*[!_]_[oi]*")
    assert status == 0, err
    status, _, err = run("--stage=smollm2_ranks", *small_smollm2)
    assert status == 0, err
    found = kept.named("smollm2/before")
    assert len(found) == 14
    before = lambda name: found[f"smollm2/before/{name}"]
    assert before("key_per_head_outputs")["points"][0]["share"] < 1
    assert before("key_value_joint_weights")["points"][0]["share"] == 0.5
    assert before("query_per_head_weights")["points"][0]["share"] == 1
    assert before("lrkv_weights")["points"][0]["lost"].keys() == {"key", "value"}
    assert before("original")["lost"] == {}
    made = tables.report()
    assert len(made.tables) == 6 and any("SmolLM2" in line for line in made.findings)


def _option(command, name):
    (given,) = (word for word in command if word.startswith(f"--{name}="))
    return pathlib.Path(given.partition("=")[2])


def test_smollm2_is_tuned_by_the_products_commands(run, small_smollm2, monkeypatch, tmp_path):
    """Which here write what they started from."""
    commands = []

    def run_command(command, log):
        commands.append(command)
        source = _option(command, "source" if "kvjax.convert" in command else "config")
        source = source if source.is_dir() else source.parent
        target = _option(command, "out" if "kvjax.convert" in command else "workdir")
        target.symlink_to(source.resolve())

    monkeypatch.setattr(smollm2, "_run", run_command)
    stage = ("--stage=smollm2_tuning", *small_smollm2, f"--runs={tmp_path}/runs", "--tokens=128")
    status, _, err = run(*stage)
    assert status == 0, err
    assert [command[1] for command in commands] == [
        *("kvjax.main", "kvjax.convert", "kvjax.main", "kvjax.convert", "kvjax.main")
    ]
    assert "--method=lrkv" in commands[3] and "--bases=1" in commands[3]
    assert "--config.train.num_steps=2" in commands[4]
    assert "--config.optimizer.matrix_learning_rate=0.0005" in commands[4]
    found = kept.named("smollm2/after")
    assert len(found) == 3
    one = found["smollm2/after/qk_text_rate0.0005/lrkv_r2_seed0"]
    assert one["commands"][1].startswith("python -m kvjax.main --config=runs/lrkv_r2/recover.py")
    assert str(tmp_path) not in one["commands"][1].partition("--config.data")[0]


@pytest.mark.slow
def test_smollm2_is_tuned(run, small_smollm2, tmp_path):
    stage = ("--stage=smollm2_tuning", *small_smollm2, f"--runs={tmp_path}/runs", "--tokens=128")
    status, _, err = run(*stage, "--only=*/thin*")
    assert status == 0, (err, [log.read_text() for log in (tmp_path / "runs").glob("*.log")])
    (one,) = kept.named("smollm2/after").values()
    assert one["share"] < 1 and one["before"] != one["after"]


def test_a_command_that_fails_says_why(tmp_path):
    with pytest.raises(UserError, match="exit status 2: kvjax: unknown option --no"):
        smollm2._run(["-m", "kvjax.convert", "--no"], tmp_path / "log")


# -- the report ------------------------------------------------------------------------------------


def _write(name, **result):
    path = kept.file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(seconds=1.0) | result))


@pytest.fixture
def results():
    """Made-up results of Whisper."""
    settings = dict(row_length=128, validation_rows=64, calibration_rows=256)
    original = dict(perplexity=100.0, cached=3072, share=1.0, num_heads=6, head_dim=64)
    _write("whisper/before/original", settings=settings, **original)
    losses = dict(key=(50, 25, 2, 1), query=(90, 60, 20, 4), value=(9, 8, 7, 6), both=(400, 99, 9))
    for part, of in losses.items():
        points = [
            dict(rank=rank, cached=1536 + 4 * rank, share=0.5 + rank / 768, perplexity=100.0 + loss)
            for rank, loss in zip((64, 96, 192, 256), of, strict=False)
        ]
        for objective in ("weights", "outputs"):
            half = [p | dict(perplexity=50 + p["perplexity"] / 2) for p in points]
            made = points if objective == "weights" else half
            for mode in ("joint", "per_head"):
                _write(f"whisper/before/{part}_{mode}_{objective}", settings=settings, points=made)
    common = settings | dict(steps=48, batch=8, tune="qkv", rate=5e-4, teacher_share=0.0)
    after = dict(control=(80.0, 81.0, 82.0), lrkv_r32=(84.0, 84.0, 86.0), thin_r128=(88.0, 90.0))
    for variant, values in after.items():
        cached = 3072 if variant == "control" else 2048
        for seed, value in enumerate(values):
            keys = dict(seed=seed, variant=variant)
            figures = dict(cached=cached, share=cached / 3072, before=120.0, after=value)
            name = f"whisper/after/qkv_text_rate0.0005/{variant}_seed{seed}"
            _write(name, settings=common | keys, **figures)


def test_tables_and_findings_are_of_the_files(run, results):
    status, out, _ = run("--markdown")
    assert status == 0
    assert "| 96 | 199 (+99.0 %) | 125 (+25.0 %) | 160 (+60.0 %) | 108 (+8.0 %) |" in out
    assert "| 256 | - | 101 (+1.0 %) | 104 (+4.0 %) | 106 (+6.0 %) |" in out
    assert "| 192 | 75.0% | 102 (+2.0 %) | 101 (+1.0 %) | 102 (+2.0 %) | 101 (+1.0 %) |" in out
    assert "| 192 | 2,304 | 50% | 25% | +1.0 % |" in out
    assert "queries, keys and values learn from text, 49,152 tokens, rate 0.0005" in out
    half = outcomes_lib.half_interval([80.0, 81.0, 82.0])
    assert f"| none (the control) | 100.0% | 120 (+20.0 %) | 81.0 ± {half:.1f} |" in out
    changes = [84 / 80 - 1, 84 / 81 - 1, 86 / 82 - 1]
    half = 100 * outcomes_lib.half_interval(changes)
    assert f"| {100 * np.mean(changes):+.1f} % ± {half:.1f} |" in out
    assert "Perplexity of 8,192 held-out tokens; before conversion 100." in out
    assert "joint, by SVD of the weights, keys lose less at 4 of 4 ranks; at 96 of 384" in out
    assert "+25.0 % against +60.0 %" in out and "joint, outputs: +1.0 %" in out
    recovered = 1 - np.log(1 + np.mean(changes)) / np.log(1.2)
    assert f"LRKV, rank 32 {recovered:.0%}" in out
    assert "LRKV is ahead in 2 of 2 seeds" in out
    kept.file("whisper/before/original").unlink()
    status, out, _ = run("--json")
    assert status == 0 and json.loads(out) == dict(name="conversion", tables=[], findings=[])


def test_pictures_are_of_the_files_and_the_same_each_time(results):
    files = plots.write()
    assert [file.name for file in files] == ["whisper_cache.png", "whisper_parts.png"]
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in plots.write()] == first
    before, after = plots.cache(outcomes_lib.Outcomes("whisper")).axes
    drawn = {line.get_label(): line for line in before.lines}
    of_keys = drawn["thin keys, one SVD of the weights"]
    assert list(of_keys.get_ydata()) == [150, 125, 102, 101]
    assert list(of_keys.get_xdata()) == [0.5 + rank / 768 for rank in (64, 96, 192, 256)]
    labels = [text.get_text() for text in after.get_legend().get_texts()]
    assert labels == ["thin keys, a latent for each head", "LRKV"]
    (lrkv,) = (c for c in after.containers if c.get_label() == "LRKV")
    assert lrkv.lines[0].get_ydata() == pytest.approx([np.mean((84, 84, 86))])


def test_nothing_is_drawn_of_nothing():
    assert plots.write() == []
