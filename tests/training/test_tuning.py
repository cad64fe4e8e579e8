"""Runs that start from a parent, tune some of its parameters, or distil a teacher."""

import dataclasses
import shutil

from etils import epath
from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from kvjax import config as config_lib, optim
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.loss import distillation_loss, token_losses
from kvjax.model.transformer import Compute
from kvjax.training import loop, preflight
from kvjax.workdir import trained
from tests import runs
from tests.runs import records

pytestmark = pytest.mark.usefixtures("one_device")


def _parameters(workdir, step):
    state = ocp.load(epath.Path(workdir) / "checkpoints" / str(step), checkpointable_name="state")
    flat = traverse_util.flatten_dict(state["params"])
    return {".".join(map(str, path)): np.asarray(w) for path, w in flat.items()}, state


def _tuning(source, parent, **train):
    """Returns a config of three AdamW steps on queries and keys."""
    config = runs.small_config(*source, num_steps=3, eval_every=3, checkpoint_every=3, **train)
    config.train.parent = str(parent)
    config.optimizer.update(tuned=("mechanism.query", "key"), matrices="adamw")
    config.optimizer.matrix_learning_rate = 1e-3
    return config


@pytest.mark.slow
def test_named_parameters_learn_and_others_stay(source, whole, tmp_path):
    """The first loss is the parent's last, and the parent is unchanged."""
    before, _ = _parameters(whole.workdir, 40)
    loop.train(_tuning(source, whole.workdir), epath.Path(tmp_path))
    after, state = _parameters(tmp_path, 3)
    changed = {name for name in after if np.any(after[name] != before[name])}
    inner = "segments.0.attention.mechanism"
    assert changed == {f"{inner}.{n}" for n in ("query", "base_key", "latent_key", "expand_key")}
    moments = {
        ".".join(str(getattr(k, "key", k)) for k in path[-5:])
        for path, leaf in jax.tree_util.tree_leaves_with_path(state["optimizer"])
        if np.ndim(leaf) > 1
    }
    assert moments == changed  # frozen parameters have no moments

    def loss(workdir):
        return [r["loss"] for r in records(workdir) if "loss" in r]

    first, untrained, trained = loss(tmp_path)[0], loss(whole.workdir)[0], loss(whole.workdir)[-1]
    assert abs(first - trained) < 0.5 < untrained - first
    again, _ = _parameters(whole.workdir, 40)
    assert all(np.array_equal(again[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_run_resumes_without_its_parent(source, whole, tmp_path):
    parent = tmp_path / "parent"
    shutil.copytree(whole.workdir, parent)
    config = _tuning(source, f"{parent}@30", stop_after=2)
    loop.train(config, epath.Path(tmp_path / "run"))
    shutil.rmtree(parent)
    config.train.stop_after = 0
    loop.train(config, epath.Path(tmp_path / "run"))
    whole_run = _tuning(source, f"{whole.workdir}@30")
    loop.train(whole_run, epath.Path(tmp_path / "whole"))
    (resumed, _), (uninterrupted, _) = (_parameters(tmp_path / n, 3) for n in ("run", "whole"))
    assert all(np.array_equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
    other, _ = _parameters(whole.workdir, 40)
    assert not np.array_equal(other["head"], resumed["head"])  # it was step 30's


@pytest.mark.slow
def test_a_context_outlives_the_parent_that_had_it(source, whole, tmp_path):
    """A run on shorter rows keeps its parent's context and token files."""
    parent = tmp_path / "parent"
    shutil.copytree(whole.workdir, parent)
    (parent / "context.json").write_text('{"context": 4096}')
    (parent / "generation_config.json").write_text('{"eos_token_id": [7, 256]}')
    (parent / "chat_template.jinja").write_text("{{ messages }}")
    run = epath.Path(tmp_path / "run")
    config = _tuning(source, parent, stop_after=2)
    loop.train(config, run)
    shutil.rmtree(parent)
    config.train.stop_after = 0
    loop.train(config, run)
    assert trained.find(run).context == trained.load(run).context == 4096
    assert trained.load(run).tokenizer.ends == (7, 256)
    assert (run / "chat_template.jinja").read_text() == "{{ messages }}"
    loop.train(_tuning(source, run, stop_after=1), epath.Path(tmp_path / "again"))
    assert trained.find(tmp_path / "again").context == 4096


@pytest.mark.slow
def test_a_teacher_with_all_of_the_loss_is_learned(source, whole, tmp_path):
    """A teacher equal to the model gives zero loss and gradient."""
    config = _tuning(source, whole.workdir, teacher=str(whole.workdir), teacher_share=1.0)
    loop.train(config, epath.Path(tmp_path))
    first = records(tmp_path)[0]  # AdamW makes steps of rounding errors
    assert abs(first["loss"]) < 1e-5 and first["grad_norm"] < 1e-4


def test_distillation_loss_is_its_formula(x64, make_mechanism):
    rng = np.random.default_rng(0)
    config = config_lib.TransformerConfig(
        block=config_lib.BlockConfig(num_layers=1, d_model=8, mlp_dim=8, logit_softcap=5.0),
        mechanisms=(make_mechanism("lrkv"),),
        vocab_size=11,
    )
    graph, shapes = parameters.graph(config), parameters.abstract(config).shapes

    def draw(w):
        return jnp.asarray(0.5 * rng.standard_normal(w.shape))

    student, teacher = (jax.tree.map(draw, shapes) for _ in range(2))
    tokens, targets = rng.integers(0, 11, (2, 2, 6))
    compute = Compute(dtype=jnp.dtype(jnp.float64), loss_chunks=3)

    def loss(student, share):
        model, teacher_model = nnx.merge(graph, student), nnx.merge(graph, teacher)
        options = dict(teacher=teacher_model, share=share, compute=compute)
        return distillation_loss(model, tokens, targets, **options)

    def formula(student, share):
        models = [nnx.merge(graph, params) for params in (student, teacher)]
        z, y = (m.logits(m(tokens, compute=compute), compute=compute) for m in models)
        p, q = jax.nn.log_softmax(z), jax.nn.log_softmax(y)
        divergence = jnp.sum(jnp.exp(q) * (q - p), axis=-1)
        nats = token_losses(models[0], tokens, targets, compute=compute)
        return jnp.mean((1 - share) * nats + share * divergence)

    product, definition = (jax.jit(jax.value_and_grad(f)) for f in (loss, formula))
    for share in (0.0, 0.3, 1.0):
        (value, grads), (expected_value, expected) = (
            product(student, share),
            definition(student, share),
        )
        assert (
            float(value) == pytest.approx(float(expected_value), rel=1e-12) and expected_value > 0.1
        )
        for grad, expected_grad in zip(
            jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(grad, expected_grad, atol=1e-12)
        assert jax.tree.all(jax.tree.map(lambda g: np.abs(g).max() > 1e-4, expected))


def test_adamw_for_matrices_is_optax_adamw():
    import optax

    config = optim.OptimizerConfig(
        **dict(matrices="adamw", matrix_learning_rate=0.1, matrix_weight_decay=0.3, clip_norm=0.0),
        cooldown_fraction=0.0,
    )
    params = dict(up=jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32))
    ours = optim.make_optimizer(config, dict(up="D -> M"), d_model=768, num_steps=5)
    theirs = optax.adamw(0.1, b1=config.adam_b1, b2=config.adam_b2, eps=1e-10, weight_decay=0.3)
    state, other = ours.init(params), theirs.init(params)
    update_ours, update_theirs = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        grads = jax.tree.map(lambda w, s=step: w * (s + 1), params)
        update, state = update_ours(grads, state, params)
        expected, other = update_theirs(grads, other, params)
        np.testing.assert_allclose(update["up"], expected["up"], rtol=1e-6)


def _bad(config, tmp_path, message):
    with pytest.raises(UserError, match=message):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_refused_parents_and_teachers(source, whole, tmp_path, monkeypatch):
    def config(**train):
        return runs.small_config(*source, num_steps=3, **train)

    here = str(whole.workdir)
    _bad(config(parent=str(tmp_path)), tmp_path, "config.train.parent = .*is no workdir of a run")
    _bad(config(parent=f"{here}@7"), tmp_path, r"config.train.parent = .*step = 7: .*it has \[")
    _bad(config(teacher=f"{here}@7"), tmp_path, "config.train.teacher = .*step = 7")
    other = config(parent=here)
    other.attention.rank = 3
    _bad(other, tmp_path, r"(?s)holds another model than.*latent_key: checkpoint \(2, 32, 2, 4\)")
    other = config(parent=here)
    other.model.logit_softcap = 3.0
    _bad(other, tmp_path, "config.train.parent = .*but it is a different model")
    short = trained.named("config.train.teacher", here)
    block = dataclasses.replace(short.experiment.model.block, positions="learned", max_positions=8)
    model = dataclasses.replace(short.experiment.model, block=block)
    experiment = dataclasses.replace(short.experiment, model=model)
    short = dataclasses.replace(short, experiment=experiment)
    with monkeypatch.context() as patch:
        patch.setattr(preflight.trained, "named", lambda *_: short)
        _bad(config(teacher="x"), tmp_path, "config.train.teacher = 'x': .*8")
    other = config()
    other.optimizer.tuned = ("attention", "keys")
    _bad(other, tmp_path, "config.optimizer.tuned: no parameter has 'keys' in its name; there are ")


def test_other_tokens_than_the_parents(source, whole, tmp_path):
    parent = tmp_path / "parent"
    shutil.copytree(whole.workdir, parent)
    file = parent / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"\u0100":'))
    config = runs.small_config(*source, num_steps=3, parent=str(parent))
    _bad(config, tmp_path, r"train.parent = .*its tokenizer is not that of .*data.tokenizer = ")
