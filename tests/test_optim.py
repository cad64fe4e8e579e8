"""Updates of each group of weights, and learning-rate schedules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

from kvjax.foundation.errors import UserError
from kvjax.layers.weight import Axes
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.optim import (
    SCHEDULES,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
    momentum_schedule,
    newton_schulz,
    scale_by_muon,
)
from tests import quick
from tests.mechanisms import FAMILIES

D = 12


def _model(mechanism):
    """A model with all kinds of weights: gains, biases, learned positions, a gate."""
    block = dict(num_layers=2, d_model=D, mlp_dim=20, norm="layer", norm_gain=True, norm_bias=True)
    more = dict(positions="learned", max_positions=6, activation="swiglu", bias=True)
    return TransformerConfig(
        block=BlockConfig(**block, **more), mechanisms=(mechanism,) * 2, vocab_size=10
    )


def _names(path):
    return tuple(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def _kind(names, x):
    """Classifies a weight by its name and number of axes, the first of which counts layers."""
    if names[0] in ("embedding", "positions"):
        return "embedding"
    if names[0] == "head":
        return "head"
    is_vector = names[-1].endswith(("gain", "bias")) or x.ndim == 2
    return "vector" if is_vector else "matrix"


def _setup(config, *, num_steps=1000, scale=1.0, seed=0, **options):
    """Returns optimizer, axes, weights and gradients of a model; no weight is zero."""
    shapes, axes = parameters.abstract(config)
    optimizer = make_optimizer(OptimizerConfig(**options), axes, d_model=D, num_steps=num_steps)
    rng = np.random.default_rng(seed)

    def draw(s):
        return rng.standard_normal(s.shape).astype(np.float32)

    weights = jax.tree.map(draw, shapes)
    grads = jax.tree.map(lambda s: scale * draw(s), shapes)
    return optimizer, axes, weights, grads


def _updated(optimizer, grads, weights):
    """Returns updates and state of a first step."""
    return jax.jit(lambda g, w: optimizer.update(g, optimizer.init(w), w))(grads, weights)


def _leaves(tree):
    return {_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


ADAM = dict(adam_b1=0.7, adam_b2=0.9, adam_epsilon=1e-2, adam_weight_decay=0.1)


@pytest.mark.parametrize("options", quick.only([ADAM], [{}, ADAM]), ids=["recipe", "all others"])
def test_adamw_is_that_of_its_paper(make_mechanism, options):
    """Loshchilov and Hutter, 2019, algorithm 2, in NumPy, float64, over steps of one rate."""
    config = _model(make_mechanism("lrkv"))
    rates = dict(embedding_learning_rate=0.3, head_learning_rate=0.02, vector_learning_rate=0.05)
    steps = dict(num_steps=10, cooldown_fraction=0.0, clip_norm=0.0)
    optimizer, _, weights, grads = _setup(config, **rates, **steps, **options)
    own = {name: options.get(f"adam_{name}", default) for name, default in RECIPE.items()}
    width = (D / 768) ** -0.5
    rates = dict(embedding=0.3 * width, head=0.02 * width, vector=0.05)
    expected = {
        names: _AdamW(x, rates[_kind(names, x)], **own)
        for names, x in _leaves(weights).items()
        if _kind(names, x) in rates
    }
    state = optimizer.init(weights)

    @jax.jit
    def stepped(gradients, state, weights):
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for step in range(4):  # gradients of other signs and sizes at every step
        gradients = jax.tree.map(lambda g, step=step: g * np.cos(2.0 * step + 3 * g), grads)
        weights, state = stepped(gradients, state, weights)
        for names, g in _leaves(gradients).items():
            if names in expected:
                expected[names].step(np.asarray(g, np.float64))
    updated = _leaves(weights)
    for names, adam in expected.items():
        np.testing.assert_allclose(updated[names], adam.x, rtol=0, atol=1e-5, err_msg=str(names))


RECIPE = dict(b1=0.8, b2=0.95, epsilon=1e-10, weight_decay=0.0)


class _AdamW:
    def __init__(self, x, rate, b1, b2, epsilon, weight_decay):
        self.x, self.t, self.m, self.v = np.asarray(x, np.float64), 0, 0.0, 0.0
        self.rate, self.b1, self.b2, self.epsilon = rate, b1, b2, epsilon
        self.weight_decay = weight_decay

    def step(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        decayed = m / (np.sqrt(v) + self.epsilon) + self.weight_decay * self.x
        self.x = self.x - self.rate * decayed


def test_every_block_matrix_has_muon_state_and_nothing_else_has(make_mechanism, mechanism_name):
    norms = dict(qk_norm="rms_gain", bias=True)
    config = _model(make_mechanism(mechanism_name, **norms))
    optimizer, _, weights, _ = _setup(config)
    state = _leaves(jax.eval_shape(optimizer.init, weights))
    kinds = {names: _kind(names, x) for names, x in _leaves(weights).items()}
    assert set(kinds.values()) == {"embedding", "head", "vector", "matrix"}
    for names, kind in kinds.items():
        holders = sorted(
            path[len(path) - len(names) - 1] for path in state if path[-len(names) :] == names
        )
        assert holders == (["momentum"] if kind == "matrix" else ["mu", "nu"]), names
    moments = [path for path in state if {"momentum", "mu", "nu"} & set(path)]
    assert len(moments) == sum(1 if kind == "matrix" else 2 for kind in kinds.values())


# Axes as stored, shape (two layers in front), then (reduction, output) axes joint and per head.
CASES = [
    ("D -> N H", (2, 16, 3, 8), ((1,), (2, 3)), ((1,), (3,))),
    ("N H -> D", (2, 3, 8, 16), ((1, 2), (3,)), ((2,), (3,))),
    ("K: R -> H", (2, 3, 4, 8), ((2,), (3,)), ((2,), (3,))),
    ("D -> K R", (2, 16, 3, 4), ((1,), (2, 3)), ((1,), (3,))),
    ("C -> N H", (2, 5, 3, 8), ((1,), (2, 3)), ((1,), (3,))),
    ("D -> M", (2, 16, 40), ((1,), (2,)), ((1,), (2,))),
    ("M -> D", (40, 16), ((0,), (1,)), ((0,), (1,))),  # not stacked
]


@pytest.mark.parametrize("per_head", [False, True], ids=["joint", "per_head"])
def test_muon_is_optax_muon_where_they_agree(x64, per_head):
    """Optax with momentum 0, fed our Nesterov mean, and the factor of the output and input dims.

    Optax's own momentum differs by its bias correction. Their epsilons differ too, by 1e-7 of a
    norm of about 10.
    """
    beta, steps = 0.9, 3
    names = [text for text, *_ in CASES]
    shapes = {text: shape for text, shape, *_ in CASES}
    dims = {text: (heads if per_head else joint) for text, _, joint, heads in CASES}
    numbers = {text: contrib.MuonDimensionNumbers(*dims[text]) for text in names}
    ours = scale_by_muon(
        {text: Axes.parse(text) for text in names},
        momentum=optax.constant_schedule(beta),
        per_head=per_head,
        dtype=jnp.dtype(jnp.float64),
    )
    theirs = contrib.scale_by_muon(beta=0.0, weight_dimension_numbers=numbers)
    rng = np.random.default_rng(0)
    zeros = {text: np.zeros(shapes[text]) for text in names}
    state, their_state, mean = ours.init(zeros), theirs.init(zeros), zeros
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(steps):
        grads = {text: rng.standard_normal(shapes[text]) for text in names}
        mean = {text: beta * mean[text] + (1 - beta) * grads[text] for text in names}
        nesterov = {text: beta * mean[text] + (1 - beta) * grads[text] for text in names}
        updates, state = update(grads, state)
        expected, their_state = their_update(nesterov, their_state)
        for text in names:
            fan_in, fan_out = (math.prod(shapes[text][a] for a in axes) for axes in dims[text])
            factor = math.sqrt(max(1, fan_out / fan_in))
            np.testing.assert_allclose(
                updates[text], factor * expected[text], rtol=1e-5, atol=1e-6, err_msg=text
            )


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48), (2, 48, 16)])
def test_singular_values_come_near_one(shape):
    rng = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    s = np.linspace(0.2, 1, u.shape[-1])
    orthogonal = jax.jit(functools.partial(newton_schulz, steps=5))
    x = np.asarray(orthogonal(jnp.asarray((u * s) @ vt * 50, jnp.float32)), np.float64)
    values = np.linalg.svd(x, compute_uv=False)
    assert 0.6 < values.min()
    assert values.max() < 1.3
    # The singular vectors stay: u^T x v is diagonal.
    core = np.swapaxes(u, 1, 2) @ x @ np.swapaxes(vt, 1, 2)
    np.testing.assert_allclose(core - core * np.eye(core.shape[-1]), 0, atol=1e-5)


def test_newton_schulz_coefficients():
    """One step of a 1 x 1 matrix is the quintic itself: 3.4445 - 4.7750 + 2.0315 at 1."""
    x = newton_schulz(jnp.asarray([[[7.0]]]), 1)
    np.testing.assert_allclose(x, 3.4445 - 4.7750 + 2.0315, rtol=1e-6)
    np.testing.assert_array_equal(newton_schulz(jnp.zeros((1, 2, 3)), 5), np.zeros((1, 2, 3)))


def test_momentum_warmup(make_mechanism):
    """nanochat: (1 - f)·0.85 + f·0.95, f = min(step/300, 1); read off the state after a step."""
    at_once = momentum_schedule(OptimizerConfig(momentum_warmup_steps=0, momentum_end=0.5))
    assert [float(at_once(step)) for step in (0, 1, 100)] == [0.5, 0.5, 0.5]
    optimizer, _, weights, grads = _setup(_model(make_mechanism("mha")), clip_norm=0.0)
    start, update = optimizer.init(weights), jax.jit(optimizer.update)
    for step, beta in ((0, 0.85), (150, 0.90), (300, 0.95), (1000, 0.95)):

        def at(x, step=step):
            return jnp.full_like(x, step) if x.dtype == jnp.int32 else x

        _, state = update(grads, jax.tree.map(at, start), weights)
        after, checked = _leaves(state), 0
        for names, g in _leaves(grads).items():
            if _kind(names, g) == "matrix":
                (mean,) = (x for path, x in after.items() if path[-len(names) :] == names)
                np.testing.assert_allclose(
                    mean, (1 - beta) * g, rtol=1e-5, atol=1e-7, err_msg=f"step {step}"
                )
                checked += 1
        assert checked == 7  # query, base key and value, out, up, gate, down


def _cosine(share):
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.parametrize(
    "options, steps, factors",
    [
        # nanochat's: constant, then a linear cooldown over a fifth of all steps.
        ({}, 1000, {0: 1, 500: 1, 800: 1, 801: 199 / 200, 900: 0.5, 999: 1 / 200}),
        (dict(final_fraction=0.1), 1000, {0: 1, 900: 0.55}),
        (dict(cooldown_fraction=0.0), 1000, {0: 1, 999: 1}),
        (dict(warmup_steps=100), 1000, {0: 0.01, 50: 0.51, 100: 1, 800: 1, 900: 0.5, 999: 1 / 200}),
        (
            dict(schedule="cosine", warmup_steps=100, final_fraction=0.1),
            1000,
            {0: 0.01, 99: 1, 100: 1, 101: _cosine(1 / 900), 550: _cosine(0.5), 775: _cosine(0.75)},
        ),
        (dict(schedule="linear"), 8, {step: 1 - step / 8 for step in range(8)}),
        (
            dict(schedule="linear", warmup_steps=2, final_fraction=0.5),
            6,
            {0: 0.5, 1: 1, 2: 1, 3: 0.875, 4: 0.75, 5: 0.625},
        ),
        (dict(warmup_steps=80), 100, {79: 1, 80: 1, 90: 0.5}),
        # WSD with a 1-sqrt cooldown.
        (dict(schedule="constant_sqrt"), 1000, {0: 1, 800: 1, 802: 0.9, 850: 0.5, 962: 0.1}),
        (
            dict(schedule="constant_sqrt", warmup_steps=100, final_fraction=0.1),
            1000,
            {0: 0.01, 99: 1, 100: 1, 800: 1, 850: 0.55, 962: 0.19},
        ),
        (dict(schedule="constant_sqrt", cooldown_fraction=0.0), 1000, {0: 1, 999: 1}),
        (dict(schedule="constant_sqrt", cooldown_fraction=1.0), 4, {0: 1, 1: 0.5}),
        (dict(schedule="constant_sqrt", warmup_steps=80), 100, {79: 1, 80: 1, 85: 0.5}),
    ],
)
def test_learning_rate_schedules(options, steps, factors):
    schedule = learning_rate_schedule(OptimizerConfig(**options), steps)
    found = [schedule(step) for step in factors]
    np.testing.assert_allclose(found, list(factors.values()), rtol=1e-5)


def test_a_warmup_must_leave_room():
    for warmup_steps, schedule, message in (
        (90, "constant", "warmup_steps = 90.*cooldown of 20 .*at most 80"),
        (90, "constant_sqrt", "warmup_steps = 90.*cooldown of 20 .*at most 80"),
        (100, "cosine", "warmup_steps = 100: must be at most 99 for .*num_steps = 100"),
    ):
        config = OptimizerConfig(warmup_steps=warmup_steps, schedule=schedule)
        with pytest.raises(UserError, match=message):
            learning_rate_schedule(config, 100)


@functools.cache
def _first_update(config, **options):
    optimizer, axes, weights, grads = _setup(config, **options)
    updates, state = _updated(optimizer, grads, weights)
    return _leaves(updates), _leaves(weights), _leaves(grads), _leaves(axes), state


@pytest.mark.parametrize("family", quick.only(["lrkv"], FAMILIES))
def test_first_update_of_the_recipe(make_mechanism, family):
    """AdamW steps by lr·sign(g); Muon's singular values are lr·sqrt(max(1, out/in))."""
    updates, _, grads, axes, _ = _first_update(_model(make_mechanism(family)))
    width = (D / 768) ** -0.5
    rates = {"embedding": 0.2 * width, "head": 0.004 * width, "vector": 0.004}
    for names, update in updates.items():
        kind, g = _kind(names, update), np.asarray(grads[names])
        if kind != "matrix":
            np.testing.assert_allclose(update, -rates[kind] * np.sign(g), rtol=1e-4)
            continue
        parsed = Axes.parse(axes[names])
        flat = np.asarray(update, np.float64)
        flat = flat.reshape(-1, *flat.shape[flat.ndim - len(parsed.names) + len(parsed.batch) :])
        fan_in = math.prod(flat.shape[1 : 1 + len(parsed.reduction)])
        flat = flat.reshape(len(flat), fan_in, -1)
        values = np.linalg.svd(flat, compute_uv=False)
        size = 0.02 * math.sqrt(max(1.0, flat.shape[2] / fan_in))
        assert 0.6 * size < np.median(values) < 1.3 * size, names
        assert values.max() < 1.3 * size, names
        assert np.sum(np.asarray(update) * g) < 0  # downhill


@pytest.mark.parametrize(
    "clip_norm, scale, factor",
    quick.only(
        [(1.0, 100.0, None)],
        [(1.0, 100.0, None), (1.0, 1e-4, 1.0), (0.0, 100.0, 1.0)],
    ),
)
def test_clipping_is_of_the_whole_gradient(make_mechanism, clip_norm, scale, factor):
    """One factor for all weights, 1/norm or 1; read off the first moments after one step."""
    options = dict(clip_norm=clip_norm, scale=scale)
    *_, grads, _, state = _first_update(_model(make_mechanism("mla")), **options)
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads.values()))
    factor = factor or clip_norm / norm
    assert (norm > 1) == (scale > 1)
    after = _leaves(state)
    for names, g in grads.items():
        holder, beta = ("momentum", 0.85) if _kind(names, g) == "matrix" else ("mu", 0.8)
        (mean,) = (x for path, x in after.items() if path[-len(names) - 1 :] == (holder, *names))
        np.testing.assert_allclose(mean, (1 - beta) * factor * g, rtol=1e-4, atol=1e-30)


def test_bounds_of_values():
    """Both ends of a range are allowed, and nothing beyond."""
    nearly_one, steps = 0.999999, (1 << 31) - 1
    rates = ("matrix", "embedding", "head", "vector")
    bounds = {
        **{f"{group}_learning_rate": (0.0, 100.0) for group in rates},
        **dict.fromkeys(("lr_scale", "matrix_weight_decay", "adam_weight_decay"), (0.0, 100.0)),
        **dict.fromkeys(("momentum_start", "momentum_end", "adam_b1", "adam_b2"), (0, nearly_one)),
        **dict.fromkeys(("cooldown_fraction", "final_fraction"), (0.0, 1.0)),
        **dict.fromkeys(("warmup_steps", "momentum_warmup_steps"), (0, steps)),
        "adam_epsilon": (1e-30, 1.0),
        "clip_norm": (1e-6, 1e6),
        "newton_schulz_steps": (0, 100),
    }
    for key, (low, high) in bounds.items():
        below, above = low - 1, high + 1
        if isinstance(high, float):
            below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
        for value in (low, high, *(0.0,) * (key == "clip_norm")):
            OptimizerConfig(**{key: value})
        for value in (below, above, math.nan):
            with pytest.raises(UserError) as error:
                OptimizerConfig(**{key: value})
            assert f"config.optimizer.{key} = {value}: must be " in str(error.value)
    with pytest.raises(
        UserError, match=r"clip_norm = -1\.0: must be 0 \(none\), or at least 1e-06"
    ):
        OptimizerConfig(clip_norm=-1.0)
    words = dict(
        orthogonalize="'joint', 'per_head'",
        schedule=", ".join(map(repr, SCHEDULES)),
        matrices="'muon', 'adamw'",
    )
    for key, allowed in words.items():
        with pytest.raises(UserError, match=f"optimizer.{key} = 'x': must be one of {allowed}$"):
            OptimizerConfig(**{key: "x"})


def test_tied_head_has_no_head_group(make_mechanism):
    block = BlockConfig(num_layers=1, d_model=D, mlp_dim=20, tied_head=True)
    config = TransformerConfig(block=block, mechanisms=(make_mechanism("mha"),), vocab_size=10)
    updates, _, grads, *_ = _first_update(config)
    assert ("head",) not in updates
    rate = 0.2 * (D / 768) ** -0.5
    np.testing.assert_allclose(
        updates["embedding",], -rate * np.sign(grads["embedding",]), rtol=1e-4
    )


def test_options_reach_the_first_update():
    """`lr_scale` reaches all groups, Muon's options and weight decay only matrices."""
    axes = dict(embedding="V D", head="D -> V", up="D -> N H", gain="D")
    shapes = dict(embedding=(5, 4), head=(4, 5), up=(2, 4, 3, 2), gain=(4,))
    rng = np.random.default_rng(0)
    params, grads = (
        {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(2)
    )

    def update(dtype="float32", **options):
        config = OptimizerConfig(clip_norm=0.0, **options)
        sizes = dict(d_model=4, num_steps=10, muon_dtype=jnp.dtype(dtype))
        optimizer = make_optimizer(config, axes, **sizes)
        return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)

    def iterated(g_XDO, steps):
        x = np.asarray(g_XDO, np.float64) / np.linalg.norm(g_XDO, axis=(1, 2), keepdims=True)
        for _ in range(steps):
            gram = x @ x.swapaxes(1, 2)
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    up = grads["up"]
    joint = math.sqrt(6 / 4) * iterated(up.reshape(2, 4, 6), 5).reshape(up.shape)
    twice = math.sqrt(6 / 4) * iterated(up.reshape(2, 4, 6), 2).reshape(up.shape)
    per_head_XHD = up.transpose(0, 2, 3, 1).reshape(6, 2, 4)  # wide, as the iteration has them
    heads = iterated(per_head_XHD, 5).reshape(2, 3, 2, 4).transpose(0, 3, 1, 2)
    cases = [
        ({}, 1, joint, 1e-5),
        (dict(lr_scale=0.02), 0.02, joint, 1e-5),
        (dict(newton_schulz_steps=2), 1, twice, 1e-5),
        (dict(orthogonalize="per_head"), 1, heads, 1e-5),
        (dict(matrix_weight_decay=0.3), 1, joint + 0.3 * params["up"], 1e-5),
        (dict(dtype="bfloat16"), 1, joint, 0.1),
    ]
    width = (4 / 768) ** -0.5
    rates = dict(embedding=0.2 * width, head=0.004 * width, gain=0.004)
    for options, scale, expected, rtol in cases:
        found = update(**options)
        error = np.abs(found["up"] / (-0.02 * scale) - expected).max() / np.abs(expected).max()
        assert error < rtol and (rtol < 0.1 or error > 1e-4), (options, error)
        for name, rate in rates.items():
            signs = np.sign(grads[name])
            np.testing.assert_allclose(found[name], -scale * rate * signs, rtol=1e-4)
