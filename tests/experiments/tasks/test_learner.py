"""Training of small models: schedules, chunks, orders of rows, evaluations."""

import functools
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.labeller import Labeller
from experiments.studies import sequence_tasks, thin_keys_tasks
from experiments.tasks import encoders, learner, sequences
from kvjax.model.transformer import Transformer


def test_the_cosine_is_that_of_the_course():
    """0.5 (1 + cos(pi t / steps)), times t / warm_up during warm-up."""
    recipe = learner.Recipe(steps=100, learning_rate=2.0, warm_up=5)
    rates = [float(recipe.rate(jnp.asarray(t))) for t in (0, 1, 5, 50, 100)]
    expected = [0, 0.2 * (1 + np.cos(np.pi / 100)), 1 + np.cos(np.pi / 20), 1, 0]
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    tenths = learner.Recipe(steps=100, learning_rate=1.0, decay="steps")
    rates = [float(tenths.rate(jnp.asarray(t))) for t in (0, 49, 50, 74, 75)]
    np.testing.assert_allclose(rates, [1, 1, 0.1, 0.1, 0.01])
    with pytest.raises(ValueError, match="decay = 'never'"):
        learner.Recipe(steps=1, learning_rate=1.0, decay="never").rate(0)


def test_an_epoch_has_every_row_once():
    rows = dict(x=np.arange(10), y=np.arange(10) * 2)
    seen = list(learner.in_order(rows, 3, 2, seed=0))
    assert len(seen) == 6 and all((batch["y"] == 2 * batch["x"]).all() for batch in seen)
    first, second = (np.concatenate([b["x"] for b in few]) for few in (seen[:3], seen[3:]))
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert first.tolist() != second.tolist()
    assert [len(batch["x"]) for batch in learner.split(rows, 4)] == [4, 4, 2]


@functools.cache
def _small(chunk: int) -> learner.Learner:
    config = sequence_tasks.transformer("qkv", 16, 1, 2)
    recipe = learner.Recipe(steps=30, learning_rate=1e-2, warm_up=5, clip=5.0)

    judged = learner.loss_and_accuracy(
        lambda model, batch, _: model(jax.nn.one_hot(batch["x"], 10))
    )
    make = functools.partial(Labeller, config, features=10)
    return learner.Learner(make, recipe, *judged, chunk=chunk)


def _batches():
    for seed in itertools.count():
        x, y = sequences.labelled("sub", 32, 8, seed)
        yield dict(x=x, y=y)


@pytest.mark.parametrize("every", [0, 4])
def test_a_nan_loss_ends_a_run(every):
    recipe = learner.Recipe(steps=8, learning_rate=1.0, decay="none")
    made = learner.Learner(
        lambda key: _One(),
        recipe,
        lambda model, batch, key: jnp.sum(model.w[...]) * batch["x"][0],
        lambda model, batch: (0, 1),
        chunk=3,
    )
    batches = iter([dict(x=np.array([1.0 if i < 5 else np.nan])) for i in range(8)])
    with pytest.raises(FloatingPointError, match="the loss is not finite from step 6 on"):
        made.train(0, batches, lambda now: None, every)


def test_a_curve_is_of_means():
    trained = learner.Trained({}, np.arange(7.0))
    assert trained.curve(3) == [1.0, 4.0, 6.0]
    assert trained.steps == 7 and trained.loss == 6.0


class _One(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))


@pytest.mark.slow
def test_a_model_learns_the_same_in_chunks_of_any_size():
    one, other = (_small(chunk).train(0, _batches()) for chunk in (1, 7))
    # Parameters may differ: without a gradient (biases of keys), Adam's steps are noise.
    assert one.loss == pytest.approx(other.loss, rel=1e-3) and one.steps == other.steps == 30
    x, y = sequences.labelled("sub", 500, 8, seed=10**6)
    before = _small(7).accuracy(
        learner.Trained(_small(7)._init(jax.random.key(0))[0], np.zeros(0)), [dict(x=x, y=y)]
    )
    after = _small(7).accuracy(other, learner.split(dict(x=x, y=y), 200))
    assert before < 0.3 and after > 0.5


def test_the_best_of_its_evaluations_is_tested(monkeypatch):
    made = _small(7)
    judged = iter([2.0, 5.0, 1.0, 3.0, 7.0])  # validation, test, validation, validation, test
    monkeypatch.setattr(made, "accuracy", lambda *_: next(judged))
    monkeypatch.setattr(made, "train", functools.partial(_evaluated, (10, 20, 30)))
    assert made.best(0, _batches(), [], [], 10) == (7.0, 30, {10: 2.0, 20: 1.0, 30: 3.0}, 0.5)
    judged = iter([2.0, 5.0, 1.0, 7.0, 3.0])
    assert made.best(0, _batches(), [], [], 10, lower=True)[:2] == (7.0, 20)


def _evaluated(steps, seed, batches, evaluate, every):
    for step in steps:
        evaluate(learner.Trained({}, np.full(step, 0.5)))
    return learner.Trained({}, np.full(step, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("variant", encoders.VARIANTS)
def test_encoders_of_projection_sharing(variant):
    """Tied projections are one weight; a position's logits depend on all other positions."""
    config = sequence_tasks.transformer(variant, 16, 2, 2)
    model = Labeller(config, jax.random.key(0), features=10)
    x = jax.nn.one_hot(np.arange(8)[None], 10)
    run = jax.jit(lambda x: model(x))
    z = run(x)
    assert z.shape == (1, 8, 10)
    changed = run(x.at[0, 7].set(0))
    assert np.all(np.abs(z - changed).max(axis=-1) > 1e-6)
    names = set(vars(model.segments[0].attention.mechanism))
    tie, channels = encoders.VARIANTS[variant]
    assert ("query" in names) == (tie in ("none", "kv"))
    assert ("base_value" in names) == (tie in ("none", "qk"))
    assert ("position_map" in names) == (channels > 0)


def test_thin_keys_models_are_causal_and_thin():
    task = thin_keys_tasks.TASKS["retrieval"]
    config = thin_keys_tasks.transformer(task, 8)
    mechanism = config.mechanisms[0]
    assert (mechanism.key_dim, mechanism.value_dim) == (2, 16)
    assert mechanism.scale == pytest.approx(2**-0.5)  # 1/sqrt(d_select / heads)
    assert config.block.causal and config.vocab_size == 33 and len(config.mechanisms) == 4


@pytest.mark.slow
def test_an_equal_start_does_not_depend_on_channels():
    """Matrices that are narrower than their input start smaller, by their fan-in."""
    task = thin_keys_tasks.TASKS["retrieval"]

    def deviation(channels, start):
        config = thin_keys_tasks.transformer(task, channels, start)
        model = Transformer(config, jax.random.key(0))
        return float(jnp.std(model.segments[0].attention.mechanism.base_key[...]))

    assert deviation(4, "fan_in") < 0.3 * deviation(64, "fan_in")
    assert deviation(4, "equal") == pytest.approx(1 / 8, rel=0.1)
    assert deviation(64, "equal") == pytest.approx(1 / 8, rel=0.1)
    names = {thin_keys_tasks.cell("retrieval", 8, start).name for start in thin_keys_tasks.STARTS}
    assert names == {"retrieval/d8", "retrieval/d8/equal"}
