"""transformers and kvjax give one model the same logits; run by `make test-live`."""

import json
import math
import subprocess

import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.convert import deepseek, into_workdir, model as model_lib, published
from kvjax.data import tokenizer
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.command_line import config_label, configs_of, load_config
from tests.convert import comparison, workdirs

PYTHON = ROOT / ".venv-live/bin/python"  # with torch and transformers
MAKE = ROOT / "tests/convert/make_logits.py"
TAKE = ROOT / "tests/convert/take_logits.py"


@pytest.mark.parametrize(
    "seed, sizes",
    [
        (1, dict(width=48, layers=3, tokens=70)),
        (2, dict(width=128, layers=2, tokens=200)),
        (3, dict(width=32, layers=8, tokens=40)),
    ],
)
def test_logits_equal_transformers(tmp_path, seed, sizes):
    options = [f"--{key}={value}" for key, value in sizes.items()]
    subprocess.run([PYTHON, MAKE, f"--seed={seed}", f"--out={tmp_path}", *options], check=True)
    folders = sorted(path.parent for path in tmp_path.glob("*/logits.npz"))
    found = {folder.name: comparison.difference(folder) for folder in folders}
    print(found)
    assert found and max(found.values()) < comparison.TOLERANCE, found
    for folder in folders if sizes["tokens"] < 50 else ():  # every token is a step
        stored, half = np.load(folder / "logits.npz"), sizes["tokens"] // 2
        ours = comparison.greedy(published.open(folder), stored["tokens"][:, :half], half)
        np.testing.assert_array_equal(ours, stored["greedy"], err_msg=folder.name)


def test_transformers_loads_exports(tmp_path):
    """Published models, and models of the recipe with their factors multiplied out."""
    before = {}
    for name in comparison.MODELS:
        before[name] = into_workdir.check(str(tmp_path / "workdirs" / name))
        into_workdir.write(published.open(comparison.PUBLISHED / name), before[name], {})
    for seed, (name, (block, mechanisms, _)) in enumerate(workdirs.MODELS.items()):
        config = workdirs.config(block, mechanisms)
        before[f"made_{name}"] = workdirs.write(
            tmp_path / "workdirs" / f"made_{name}", config, seed
        )
    models = {name: model_lib.open(workdir) for name, workdir in before.items()}
    folders = {name: tmp_path / name for name in models}
    for name, folder in folders.items():
        workdirs.export(before[name], folder, "--format=huggingface", "--dtype=float32")
        rows = models[name].transformer.vocab_size
        np.save(
            folder / "tokens.npy", np.random.default_rng(1).integers(0, rows, (2, 24), np.int32)
        )
    done = subprocess.run(
        [PYTHON, TAKE, *folders.values()], check=False, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
    # The tiny models were trained on no fewer tokens than they have positions.
    warnings = [line for line in done.stderr.splitlines() if "original_max_pos" not in line]
    assert not warnings, done.stderr
    found = {}
    for name, folder in folders.items():
        theirs, model = np.load(folder / "logits.npz"), models[name]
        tokens_BT, logits_BTV = np.load(folder / "tokens.npy"), theirs["logits"]
        found[name] = comparison.difference_of(model, tokens_BT, logits_BTV)
        own = tokenizer.from_json(model.tokenizer_json, name)
        opened = [own.bos_id] * name.startswith("made_")  # published tokenizers keep theirs
        assert list(theirs["ids"]) == [*opened, *own.encode("a b 3")], name
    print(found)
    assert max(found.values()) < comparison.TOLERANCE, found


@pytest.mark.parametrize("engine", deepseek.ENGINES)
def test_transformers_runs_deepseek_exports_and_caches_c_and_p(tmp_path, engine):
    """Logits, greedy continuations and cached numbers of every config in configs/serving.py."""
    files = configs_of(CONFIGS / "serving.py")
    models, folders = {}, {}
    for seed, (name, file) in enumerate((config_label(path), path) for path in files):
        config = config_lib.resolve(load_config(file)).model
        workdir = workdirs.write(tmp_path / "workdirs" / name, config, seed)
        models[name], folders[name] = model_lib.open(workdir), tmp_path / name
        options = ("--format=deepseek", f"--engine={engine}", "--dtype=float32")
        workdirs.export(workdir, folders[name], *options)
        tokens_BT = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 24), np.int32)
        np.save(folders[name] / "tokens.npy", tokens_BT)
    subprocess.run([PYTHON, TAKE, *folders.values()], check=True)
    found = {}
    for name, folder in folders.items():
        theirs, tokens_BT = np.load(folder / "logits.npz"), np.load(folder / "tokens.npy")
        ours_BTV = comparison.logits(models[name], tokens_BT)
        found[name] = np.abs(ours_BTV - theirs["logits"]).max() / np.abs(ours_BTV).max()
        # The continuation that they found, if each of its tokens is our most likely one.
        whole_BT = np.concatenate([tokens_BT, theirs["greedy"]], axis=1)
        assert theirs["greedy"].shape[1] > 0, name
        likely_BT = comparison.logits(models[name], whole_BT).argmax(-1)
        np.testing.assert_array_equal(likely_BT[:, 23:-1], theirs["greedy"])
        config = json.loads((folder / "config.json").read_text())
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        assert theirs["cached"].tolist() == [numbers] * config["num_hidden_layers"]
        if engine == "transformers":  # not padded: as many as kvjax caches
            entry = models[name].transformer.mechanisms[0].entry()
            assert numbers == sum(math.prod(field.shape) for field in entry.values())
    print(found)
    assert max(found.values()) < 1e-4, found
