"""Training and evaluation steps of a toy model whose losses are a formula."""

import dataclasses
import functools
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.config import TrainConfig
from kvjax.distributed import sharding
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.optim import OptimizerConfig, trainable
from kvjax.training import program

VOCABULARY, BEGINS, RATE = 11, 3, 0.1


class _Model(nnx.Module):
    """A model of two parameters; only `seen` is trainable."""

    def __init__(self, scale):
        self.seen = nnx.Param(jnp.linspace(0.5, 1.5, VOCABULARY) * scale)
        self.wanted = nnx.Param(jnp.linspace(2, 1, VOCABULARY) * scale)


def _nats(seen, wanted, tokens, targets, positions, documents):
    return seen[tokens] ** 2 * wanted[targets] * (1 + positions / 8) * (2 + documents)


def token_losses(model, tokens, targets, *, compute, positions_BT, segment_ids_BS):
    del compute
    documents = 0 if segment_ids_BS is None else segment_ids_BS
    return _nats(model.seen[...], model.wanted[...], tokens, targets, positions_BT, documents)


def mean_loss(model, *arrays, weights_BT=None, scale=None, dropout=None, **options):
    nats = token_losses(model, *arrays, **options)
    factor = 1 if dropout is None else jax.random.uniform(dropout)
    if weights_BT is None:
        return jnp.mean(nats) * factor
    return jnp.sum(nats * weights_BT) * scale * factor


def distillation_loss(model, *arrays, teacher, share, dropout, **options):
    del dropout
    loss, teacher_loss = (jnp.mean(token_losses(m, *arrays, **options)) for m in (model, teacher))
    return (1 - share) * loss + share * loss * teacher_loss


def _split(rows, separate):
    """Returns tokens, targets, loss mask, positions and documents."""
    tokens = np.where(rows < 0, ~rows, rows)
    documents = np.cumsum(tokens[:, :-1] == BEGINS, axis=1) if separate else 0
    positions = np.arange(rows.shape[1] - 1)[None]
    return tokens[:, :-1], tokens[:, 1:], rows[:, 1:] >= 0, positions, documents


@pytest.fixture
def toy(monkeypatch):
    """Patches losses to formulas; returns graph, parameters, the teacher's, and rows."""
    for function in (token_losses, mean_loss, distillation_loss):
        monkeypatch.setattr(program, function.__name__, function)
    models = [nnx.split(_Model(scale)) for scale in (1.0, 0.7)]
    (graph, params), (_, teacher) = [(g, nnx.to_pure_dict(state)) for g, state in models]
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (6, 6)).astype(np.int32)
    rows[:, 2] = BEGINS
    masked = np.where(np.random.default_rng(1).random(rows.shape) < 0.6, rows, ~rows)
    single = ~rows  # one target
    single[3, 4] = rows[3, 4]
    return types.SimpleNamespace(
        graph=graph, params=params, teacher=teacher, rows=rows, masked=masked, single=single
    )


def test_a_step_is_its_formula(toy):
    """Checks loss, gradient and new state for each option of `train_step`."""
    optimizer = optax.sgd(RATE)

    def select_trainable(params):
        return dict(seen=params["seen"])

    seen, wanted = (np.asarray(toy.params[key], np.float64) for key in ("seen", "wanted"))
    key = jax.random.key(5)
    bad = dict(skipped=jnp.int32(4), in_a_row=jnp.int32(2), mean_loss=jnp.float32(0.01))
    state = dict(params=toy.params, optimizer=optimizer.init(select_trainable(toy.params)), bad=bad)
    state |= dict(step=jnp.int32(7), key=jax.random.key_data(key))
    skip = TrainConfig(num_steps=1, batch_size=1, bad_steps="skip", spike_factor=2.0)
    for case in (
        dict(accumulation_steps=1),
        dict(accumulation_steps=3),
        dict(accumulation_steps=1, bos_id=BEGINS),
        dict(accumulation_steps=3, bos_id=BEGINS, masked=True),
        dict(accumulation_steps=1, masked=True),
        dict(accumulation_steps=1, masked=True, single=True),
        dict(accumulation_steps=1, has_dropout=True),
        dict(accumulation_steps=3, has_dropout=True),
        dict(accumulation_steps=1, config=TrainConfig(num_steps=1, batch_size=1)),
        dict(accumulation_steps=1, config=skip),
        dict(accumulation_steps=1, bos_id=BEGINS, teacher=0.3),
    ):
        accumulation_steps, masked = case["accumulation_steps"], case.get("masked", False)
        rows = toy.masked if masked else toy.rows
        rows = toy.single if case.pop("single", False) else rows
        tokens, targets, counted, positions, documents = _split(rows, "bos_id" in case)
        weights = np.ones((6, 1))
        if "has_dropout" in case:
            step_key = jax.random.fold_in(key, 7)
            keys = (
                [step_key]
                if accumulation_steps == 1
                else jax.random.split(step_key, accumulation_steps)
            )
            weights[:, 0] = [jax.random.uniform(keys[i % accumulation_steps]) for i in range(6)]
        weights = weights * (counted / counted.sum() if masked else 1 / counted.size)
        nats = _nats(seen, wanted, tokens, targets, positions, documents)
        grads = np.zeros(VOCABULARY)
        np.add.at(grads, tokens, 2 * nats * weights / seen[tokens])
        loss = np.sum(nats * weights)
        options = dict(case, graph=toy.graph, optimizer=optimizer, compute=Compute())
        options["select_trainable"], extra = select_trainable, []
        if share := options.pop("teacher", 0):
            config = TrainConfig(num_steps=1, batch_size=1, teacher_share=share)
            options |= dict(teacher_graph=toy.graph, config=config)
            extra = [toy.teacher]
            taught = _nats(seen * 0.7, wanted * 0.7, tokens, targets, positions, documents)
            factor = 1 - share + share * taught.mean()
            loss, grads = loss * factor, grads * factor
        new, metrics = program.train_step(state, jnp.asarray(rows), *extra, **options)
        updated = seen if case.get("config") == skip else seen - RATE * grads
        close = dict(rtol=1e-5, err_msg=str(case))
        np.testing.assert_allclose(metrics.pop("loss"), loss, **close)
        np.testing.assert_allclose(metrics.pop("grad_norm"), np.linalg.norm(grads), **close)
        norm = np.sqrt(np.sum(updated**2) + np.sum(wanted**2))
        np.testing.assert_allclose(metrics.pop("param_norm"), norm, **close)
        np.testing.assert_allclose(new["params"]["seen"], updated, **close)
        np.testing.assert_array_equal(new["params"]["wanted"], toy.params["wanted"])
        np.testing.assert_array_equal(new["key"], state["key"])
        assert new["step"] == 8 and ("bad" in new) == ("config" in options), case
        assert set(new) - {"bad"} == {"params", "optimizer", "step", "key"}
        reported = dict(bad=1, mean_loss=np.float32(0.01), skipped_steps=5, bad_steps_in_a_row=3)
        assert metrics == (reported if case.get("config") == skip else {}), case


def test_sums_of_an_evaluation_are_over_targets_with_bytes(toy):
    sizes = np.array([0, 1, 2, 0, 3, 1, 1, 4, 0, 2, 5])
    seen, wanted = (np.asarray(toy.params[key], np.float64) for key in ("seen", "wanted"))
    for masked, bos_id in ((False, None), (False, BEGINS), (True, None), (True, BEGINS)):
        rows = toy.masked if masked else toy.rows
        tokens, targets, counted, positions, documents = _split(rows, bos_id is not None)
        nats = _nats(seen, wanted, tokens, targets, positions, documents)
        expected = []
        for count in (counted, np.ones_like(counted)) if masked else (counted,):
            sized = count * sizes[targets]
            expected += [np.sum(nats * (sized > 0)), sized.sum(), np.sum(sized > 0)]
        options = dict(graph=toy.graph, compute=Compute(), masked=masked, bos_id=bos_id)
        sums = program.eval_step(toy.params, jnp.asarray(rows), jnp.asarray(sizes), **options)
        np.testing.assert_allclose(sums, expected, rtol=1e-5)
        # A text that follows a token without bytes loses some.
        lost = np.array([0, 0, 1, 0, 2, 0, 1, 0, 0, 1, 3])
        both = jnp.asarray(np.stack([sizes, lost]))
        fewer = program.eval_step(toy.params, jnp.asarray(rows), both, **options)
        starts = (sizes[tokens] == 0) * lost[targets]
        for i, count in enumerate((counted, np.ones_like(counted)) if masked else (counted,)):
            expected[3 * i + 1] -= np.sum(starts * count)
        np.testing.assert_allclose(fewer, expected, rtol=1e-5)
        assert np.sum(starts * counted)
    # Over two devices each has the first and the last quarter, or the two between.
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    rows = np.arange(27).reshape(3, 9) ** 2
    split = types.SimpleNamespace(sequence_shards=2, shard_activations=lambda x: x)
    tokens, targets, positions = program.next_tokens(rows, split)
    np.testing.assert_array_equal(tokens, rows[:, order])
    np.testing.assert_array_equal(targets, rows[:, 1:][:, order])
    np.testing.assert_array_equal(positions, [order])


def test_programs_follow_their_experiment(monkeypatch, make_mechanism):
    """Pins shardings and options of both steps and of the optimizer."""
    dropping = TransformerConfig(
        block=BlockConfig(num_layers=2, d_model=16, mlp_dim=24, dropout=0.25),
        mechanisms=(make_mechanism("lrkv"),) * 2,
        vocab_size=48,
    )
    plain = dataclasses.replace(dropping, block=dataclasses.replace(dropping.block, dropout=0.0))
    other = dataclasses.replace(plain, block=dataclasses.replace(plain.block, mlp_dim=40))
    compute, jitted, optimized = Compute(dtype=jnp.dtype(jnp.bfloat16)), [], []
    real_jit, real_optimizer = jax.jit, program.make_optimizer

    def jit(*arguments, **options):
        jitted.append((*arguments, options))
        return real_jit(*arguments, **options)

    def optimizer(*arguments, **options):
        optimized.append((arguments, options))
        return real_optimizer(*arguments, **options)

    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setattr(program, "make_optimizer", optimizer)
    wanted = OptimizerConfig(tuned=("query",))
    runs = ((2, dropping, other, True), (1, plain, None, False))
    for devices, model, teacher, separate in runs:
        train = TrainConfig(num_steps=9, batch_size=12, grad_accumulation=3, separate=separate)
        experiment = types.SimpleNamespace(
            **dict(model=model, optimizer=wanted, train=train, is_masked=separate),
            data=types.SimpleNamespace(sequence_length=20),
        )
        mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:devices])
        jitted.clear()
        built = program.Program(experiment, compute, mesh, teacher, 7)
        used = dataclasses.replace(compute, mesh=mesh) if devices > 1 else compute
        (_, init), *steps = [j for j in jitted if "init" in str(j[0]) or hasattr(j[0], "keywords")]
        (train_step, train_options), (eval_step, eval_options) = steps
        shapes, axes = parameters.abstract(model)
        shardings = sharding.parameter_shardings(mesh, shapes, axes)
        (arguments, options) = optimized.pop()
        learned = functools.partial(trainable, wanted)
        assert arguments == (wanted, learned(axes)) and options.pop("shardings") == (
            learned(shardings) if devices > 1 else None
        )
        assert options == dict(d_model=16, num_steps=9, muon_dtype=compute.dtype)
        state = built.abstract_state
        assert jax.tree.map(lambda x: x.sharding, state["params"]) == shardings
        counts = dict(skipped=jnp.int32, in_a_row=jnp.int32, mean_loss=jnp.float32)
        replicated = jax.NamedSharding(mesh, jax.P())

        def shaped(dtype, s=replicated):
            return jax.ShapeDtypeStruct((), dtype, sharding=s)

        assert state["bad"] == {name: shaped(dtype) for name, dtype in counts.items()}
        assert state["step"] == shaped(jnp.int32) and state["key"].shape == (2,)
        assert init["out_shardings"] == jax.tree.map(lambda x: x.sharding, state)
        assert train_options == dict(donate_argnums=0, out_shardings=(init["out_shardings"], None))
        assert eval_options == {} and eval_step.func is program.eval_step
        keywords = dict(train_step.keywords)
        assert (
            keywords.pop("select_trainable")(axes) == learned(axes)
            and keywords.pop("optimizer").update
        )
        bos_id = 7 if separate else None
        evaluated = dict(graph=built.graph, compute=used, masked=separate, bos_id=bos_id)
        assert eval_step.keywords == evaluated and built.graph == parameters.graph(model)
        of_teacher = {} if teacher is None else dict(teacher_graph=parameters.graph(teacher))
        assert keywords == evaluated | of_teacher | dict(
            accumulation_steps=3, config=train, has_dropout=separate
        )
        assert train_step.func is program.train_step
        split = sharding.batch_sharding(mesh)
        assert built.abstract_rows == jax.ShapeDtypeStruct((12, 21), jnp.int32, sharding=split)
        monkeypatch.setattr(
            built, "train_step", types.SimpleNamespace(lower=lambda *arguments: arguments)
        )
        arguments = []
        if teacher is not None:
            teacher_shapes, axes = parameters.abstract(teacher)
            arguments = [
                jax.tree.map(
                    lambda x, placement: jax.ShapeDtypeStruct(
                        x.shape, jnp.bfloat16, sharding=placement
                    ),
                    teacher_shapes,
                    sharding.parameter_shardings(mesh, teacher_shapes, axes),
                )
            ]
        assert built.abstract_teacher == (arguments[0] if arguments else None)
        assert built.lowered_step() == (state, built.abstract_rows, *arguments)
