"""SmolLM2's stages on a small random model."""

import pathlib
import zlib

from etils import epath
import numpy as np
import pytest

from experiments.conversion import curves, records, smollm2, tables
from kvjax.attention import GroupedConfig
from kvjax.convert import __main__ as convert_command, into_workdir
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from tests import runs

pytestmark = pytest.mark.usefixtures("small")


class _Random:
    """A random GQA model with RoPE, as a `kvjax.convert.model.Model`."""

    name, context, chat_template, token_files = "small", 32, None, {}
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
        shapes = parameters.shapes(self.transformer)
        return {path: (shape, np.dtype(np.float32)) for path, shape in shapes.items()}

    def read(self, path, layer=None):
        shape = self.parameters()[path][0][0 if layer is None else 1 :]
        rng = np.random.default_rng(zlib.crc32(repr((path, layer)).encode()))
        return (rng.standard_normal(shape) / 3).astype(np.float32)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Returns the model's workdir and its text."""
    folder = tmp_path_factory.mktemp("smollm2")
    into_workdir.write(_Random(folder), epath.Path(folder / "model"), {})
    return folder / "model", runs.write_text(folder / "text.txt")


@pytest.fixture
def small_smollm2(workdir, monkeypatch):
    """Returns the options that name the workdir."""
    folder, text = workdir
    monkeypatch.setattr(smollm2, "TEXT", text)
    monkeypatch.setattr(smollm2, "ROW_LENGTH", 16)
    monkeypatch.setattr(smollm2, "CALIBRATION_TOKENS", 64)
    monkeypatch.setattr(smollm2, "RANKS", (2,))
    monkeypatch.setattr(smollm2, "SPLIT_RANKS", (2,))
    monkeypatch.setattr(smollm2, "RESIDUAL_RANKS", (2,))
    variants = dict(control=(), thin_r2=(ThinKeys(rank=2),), lrkv_r2=(LowRankKV(rank=2),))
    monkeypatch.setattr(smollm2, "TUNED", variants)
    return f"--smollm2={folder}", "--validation_tokens=32"


@pytest.mark.slow
def test_ranks_of_smollm2(run, small_smollm2):
    status, _, err = run("--stage=smollm2_ranks", *small_smollm2, "--only=*[!_]_[oi]*")
    assert status == 0, err
    status, _, err = run("--stage=smollm2_ranks", *small_smollm2)
    assert status == 0, err
    found = records.in_folder("smollm2/before")
    assert len(found) == 15

    def before(name):
        return found[f"smollm2/before/{name}"]

    assert before("key_per_head_outputs")["points"][0]["share"] < 1
    assert before("key_value_joint_weights")["points"][0]["share"] == 0.5
    (split,) = before("key_value_split_outputs")["points"]
    assert split["share"] <= 0.5 and sum(split["ranks"]) <= 8
    assert before("query_per_head_weights")["points"][0]["share"] == 1
    assert before("lrkv_weights")["points"][0]["lost"].keys() == {"key", "value"}
    assert before("original")["lost"] == {}
    assert len(tables.report()) == 6


def _option(command, name):
    (given,) = (word for word in command if word.startswith(f"--{name}="))
    return pathlib.Path(given.partition("=")[2])


@pytest.mark.slow
def test_smollm2_is_tuned_by_the_products_commands(run, small_smollm2, monkeypatch, tmp_path):
    """Stand-ins for the commands copy the source folder."""
    commands = []

    def run_command(command, log):
        commands.append(command)
        if "kvjax.convert" in command:
            convert_command.make_parser().parse(command[2:])  # has all these options
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
    assert "--config.optimizer.tuned=('mechanism.',)" in commands[4]
    found = records.in_folder("smollm2/after")
    assert len(found) == 3
    one = found["smollm2/after/qkv_text_rate0.0005/lrkv_r2_seed0"]
    assert one["commands"][1].startswith("python -m kvjax.main --config=runs/lrkv_r2/recover.py")
    assert str(tmp_path) not in one["commands"][1].partition("--config.data")[0]


@pytest.mark.slow
def test_smollm2_is_tuned(run, small_smollm2, tmp_path):
    stage = ("--stage=smollm2_tuning", *small_smollm2, f"--runs={tmp_path}/runs", "--tokens=128")
    status, _, err = run(*stage, "--only=*/thin*")
    assert status == 0, (err, [log.read_text() for log in (tmp_path / "runs").glob("*.log")])
    (one,) = records.in_folder("smollm2/after").values()
    assert one["share"] < 1 and one["before"] != one["after"]


@pytest.mark.slow
def test_a_command_that_fails_says_why(tmp_path):
    with pytest.raises(UserError, match="exit status 2: kvjax: unknown option --no"):
        smollm2._run(["-m", "kvjax.convert", "--no"], tmp_path / "log")


def test_smollm2s_variants_have_the_bytes_they_are_named_for():
    (lrkv, joint) = (smollm2.TUNED[name] for name in ("lrkv_r16", "thin_kv_joint_as_lrkv_r16"))
    of = dict(num_heads=9, num_kv_heads=3, num_bases=3, rank=0, key_dim=64, value_dim=64)
    source = GroupedConfig(**of, qk_norm="none")

    def cached(methods):
        return curves.cached([methods[0].mechanism(source, rope=True)])

    assert cached(lrkv) == cached(joint) == 2 * (64 + 3 * 16)
