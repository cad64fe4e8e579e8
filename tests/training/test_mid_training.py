"""Mid-training on conversations: the vocabulary grows, and the parent stays as it is."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from kvjax.conversation import synthetic
from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.tokenizer import CONVERSATION_SPECIALS
from kvjax.distributed import sharding
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.errors import UserError
from kvjax.model import parameters, transformer
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer
from kvjax.training import growth, loop
from kvjax.workdir import lineage, trained
from tests import runs
from tests.runs import records
from tests.training.test_resume import assert_bitwise_equal, final_state

pytestmark = pytest.mark.usefixtures("one_device")

BYTES, CHAT = 257, 265  # tokens of bytes, and with the other eight specials
MADE_UP = dict(conversations="embedded#0:450", validation_conversations="embedded#450:500")


def _mid(source, parent, *, mixture=MADE_UP, **train):
    """Returns the config of a run on conversations with a parent."""
    keys = dict(num_steps=6, eval_every=6, checkpoint_every=3, eval_rows=8)
    config = runs.small_config(*source, **keys | train).unlock()
    config.train.parent = str(parent)
    config.data.update(source="mixture", tokenizer="parent", vocab_size=CHAT)
    config.mixture = ml_collections.ConfigDict(dataclasses.asdict(MixtureConfig(**mixture)))
    return config.lock()


def _files(folder):
    """Returns path -> (digest, modification time) of a folder's files."""
    paths = (path for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file())
    return {p: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in paths}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["all", "assistant"])
def test_a_run_resumes_without_its_parent_which_is_unchanged(source, whole, tmp_path, loss):
    """A run resumed without its parent ends with the same bits, and records its parent."""
    parent = tmp_path / "parent"
    shutil.copytree(whole.workdir, parent)
    before = _files(parent)
    mixture = MADE_UP | dict(loss=loss)
    loop.train(_mid(source, parent, mixture=mixture), epath.Path(tmp_path / "whole"))
    assert _files(parent) == before
    loop.train(_mid(source, parent, mixture=mixture, stop_after=4), epath.Path(tmp_path / "run"))
    assert _files(parent) == before
    parent.rename(tmp_path / "gone")
    loop.train(_mid(source, parent, mixture=mixture), epath.Path(tmp_path / "run"))
    assert_bitwise_equal(*(final_state(tmp_path / name) for name in ("run", "whole")))
    saved = trained.find(tmp_path / "run")
    assert saved.experiment.model.vocab_size == saved.tokenizer.vocab_size == CHAT
    assert None not in map(saved.tokenizer.special, CONVERSATION_SPECIALS)
    recorded = json.loads((tmp_path / "run" / lineage.PARENT).read_text())
    digest = lineage.digest(epath.Path(tmp_path / "gone" / "checkpoints" / "40"))
    assert recorded == dict(workdir=str(parent), step=40, sha256=digest)
    assert digest != lineage.digest(epath.Path(tmp_path / "gone" / "checkpoints" / "30"))
    last = records(tmp_path / "run")[-1]
    assert ("validation_bpb_all" in last) == (loss == "assistant")
    losses = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    assert losses[-1] < losses[0] < 6  # it began with what the parent knew, and eight new tokens


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("before, after", [(257, 265), (2048, 2056)])
def test_logits_of_old_tokens_stay_to_the_bit_at_their_width(
    make_mechanism, randomise, before, after, tied
):
    small, large = (
        TransformerConfig(
            block=BlockConfig(num_layers=2, d_model=16, mlp_dim=16, tied_head=tied),
            mechanisms=(make_mechanism("lrkv"),) * 2,
            vocab_size=size,
        )
        for size in (before, after)
    )
    _, params = randomise(lambda: Transformer(small, jax.random.key(0)), dtype=np.float32)
    initial = nnx.to_pure_dict(nnx.state(Transformer(large, jax.random.key(3))))
    place = jax.NamedSharding(sharding.make_mesh(sharding.MeshConfig(), jax.devices()), jax.P())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), initial
    )
    abstract_parent = growth.parent_abstract(abstract, small.vocab_size)
    assert jax.tree.map(jnp.shape, abstract_parent) == jax.tree.map(np.shape, params)
    params = jax.tree.map(jnp.asarray, params)
    grown = growth.grow(params, growth.growable(initial), abstract)
    old = small.vocab_size
    np.testing.assert_array_equal(grown["embedding"][old:], initial["embedding"][old:])
    assert np.std(grown["embedding"][old:]) > 0.5
    if not tied:
        assert not np.any(grown["head"][:, old:])
    tokens = np.random.default_rng(0).integers(0, old, (3, 24))

    def logits(config, params, width):
        """Multiplies by a head of exactly this width: libraries treat 2,048 columns differently."""
        graph = parameters.graph(config)
        model, compute = nnx.merge(graph, params), Compute()
        activations = jax.jit(lambda: model(tokens, compute=compute))()
        head_DV = model.head_weight(compute)[:, :width]
        return jax.jit(lambda x, head: transformer.logits(x, head, 15.0))(activations, head_DV)

    expected = logits(small, params, old)
    assert np.std(expected) > 0.1
    np.testing.assert_array_equal(logits(large, grown, old), expected)
    # At its whole width a processor's library may sum in another order.
    np.testing.assert_allclose(logits(large, grown, after)[..., :old], expected, atol=1e-5)


def test_a_vocabulary_that_the_mesh_does_not_divide_grows_to_one_that_it_does():
    """257 tokens over five devices are replicated until there are 265."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1, tensor=5), jax.local_devices()[:5])
    specs = dict(embedding=("tensor", "fsdp"), head=("fsdp", "tensor"), other=(None,))
    shapes = dict(embedding=(CHAT, 4), head=(4, CHAT), other=(3,))

    def place(name):
        return jax.NamedSharding(mesh, jax.P(*specs[name]))

    abstract = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(name))
        for name, shape in shapes.items()
    }
    abstract_parent = growth.parent_abstract(abstract, BYTES)

    def draw(x):
        return np.random.default_rng(0).standard_normal(x.shape).astype("f4")

    old = {name: jax.device_put(draw(x), x.sharding) for name, x in abstract_parent.items()}
    initial = {name: jax.device_put(draw(x), x.sharding) for name, x in abstract.items()}
    grown = growth.grow(old, growth.growable(initial), abstract)
    assert {name: (x.shape, x.sharding) for name, x in grown.items()} == {
        name: (x.shape, x.sharding) for name, x in abstract.items()
    }
    np.testing.assert_array_equal(grown["embedding"][:BYTES], old["embedding"])
    np.testing.assert_array_equal(grown["embedding"][BYTES:], initial["embedding"][BYTES:])
    np.testing.assert_array_equal(grown["head"][:, :BYTES], old["head"])
    assert not np.any(grown["head"][:, BYTES:])
    assert growth.parent_abstract(abstract, CHAT) == abstract  # nothing is lacking
    same = growth.grow(initial, growth.growable(initial), abstract)
    assert all(same[name] is initial[name] for name in abstract)


# -- refused runs ----------------------------------------------------------------------------------


def _bad(config, workdir, message):
    with pytest.raises(UserError, match=message):
        loop.train(config, epath.Path(workdir))
    assert not (workdir / "checkpoints").exists()


@pytest.mark.slow
def test_refused_conversations(source, whole, tmp_path):
    run, parent = tmp_path / "run", str(whole.workdir)
    text = dict(source="embedded", tokenizer="byte")
    missing = MADE_UP | dict(gsm8k=str(tmp_path / "none.parquet"))
    cases = [
        (_mid(source, ""), {}, "tokenizer = 'parent': config.train.parent is empty; give"),
        (_mid(source, parent), dict(tokenizer="bpe"), "no tokenizer is trained on conversations"),
        (
            _mid(source, parent),
            text,
            r"source = 'embedded': with conversations .* must be 'mixture'",
        ),
        (runs.small_config(*source), dict(source="mixture"), "'mixture': needs config.mixture"),
        (
            _mid(source, parent, mixture=MADE_UP | dict(pack="whole"), teacher=parent),
            {},
            "config.train.teacher = .*distillation does not support a loss mask",
        ),
        (_mid(source, parent, mixture=missing), {}, "config.mixture.gsm8k = .*matches no file"),
    ]
    for config, data, message in cases:
        config.data.update(data)
        _bad(config, run, message)
    assert not list(run.glob("*.json"))


@pytest.mark.slow
def test_prepared_rows(source, whole, tmp_path):
    """Rows prepared elsewhere give the same losses."""
    loop.train(_mid(source, whole.workdir, stop_after=1), epath.Path(tmp_path / "first"))
    folder = next(
        path.parent
        for path in epath.Path(source[1]).glob("datasets/*/dataset.json")
        if json.loads(path.read_text()).get("mixture", {}).get("conversations") == "embedded#0:450"
        and not json.loads(path.read_text())["masked"]
    )
    config = _mid(source, whole.workdir, stop_after=1)
    config.data.source = f"prepared:{folder}"
    loop.train(config, epath.Path(tmp_path / "second"))
    assert records(tmp_path / "second")[0]["loss"] == records(tmp_path / "first")[0]["loss"]


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_letters_and_sums_are_learned(tmp_path):
    """Trains 500 steps of 4 rows on 450 conversations; chance gets a fourth of the letters.

    The model answers 100 newly drawn conversations. Nearly all of their letters are new, but most
    of the sums are not, since there are only 100. Runs are command lines, with all of XLA's
    optimisations. 300 steps of 8 rows gave 20 to 23 of 25 letters, since rounding differs by
    machine; 500 steps of 4 rows gave all of 200, and are cheaper.
    """
    from kvjax.conversation.dialogue import NativeDialogue
    from kvjax.decoding.answers import answers
    from kvjax.decoding.generator import Generator

    parent = ["lrkv_tiny.py", f"--workdir={tmp_path}/parent", "--config.train.stop_after=10"]
    child = ["mid.py:lrkv_tiny", f"--workdir={tmp_path}/mid"]
    child += [f"--config.train.parent={tmp_path}/parent", "--config.train.num_steps=500"]
    child += ["--config.train.batch_size=4", "--config.train.grad_accumulation=1"]
    for config, *flags in (parent, child):
        command = [sys.executable, "-m", "kvjax.main", f"--config={CONFIGS / config}", *flags]
        command += [f"--config.data.directory={tmp_path}/data"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=540)
    loaded = trained.load(epath.Path(tmp_path / "mid"))
    dialogue = NativeDialogue(loaded.tokenizer, "the workdir")
    generator, right = Generator(loaded.model, loaded.compute), dict(letter=[], sum=[])
    rows = synthetic.conversations(100, seed=1)
    prompts = [dialogue.prompt(row["messages"][:1]).ids for row in rows]
    for row, answer in zip(rows, answers(generator, dialogue, prompts, num_tokens=24), strict=True):
        content = row["messages"][1]["content"]
        if isinstance(content, str):
            right["letter"].append(answer.text == content)
        else:
            expected = content[-1]["text"].rpartition("#### ")[2]
            right["sum"].append(answer.text.rpartition("#### ")[2] == expected)
    assert {name: len(outcomes) for name, outcomes in right.items()} == dict(letter=50, sum=50)
    assert np.mean(right["letter"]) > 0.8 and np.mean(right["sum"]) > 0.6, right
