"""Every mechanism's attention against softmax attention written head by head in NumPy."""

import functools
import types

from flax import nnx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache
from kvjax.attention import Attention, attention
from kvjax.attention.attention import softmax_attention
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.layers import rope
from tests import quick, reference
from tests.compiled import compiled
from tests.mechanisms import FAMILIES, MECHANISMS

B, T, D, BASE = 2, 7, 16, 100.0
KINDS = ("lrkv_gqa", "qk_tied_plus")  # a base and a residual; channels of position
_PROJECTED = ("mha", "lrkv_gqa", "factored_joint", "mla", "thin_keys", "qk_tied_plus")
# Every pair of values of two options is in one row.
OPTIONS = [
    dict(qk_norm="none", rope=True, bias=False, causal=True),
    dict(qk_norm="none", rope=False, bias=True, causal=False),
    dict(qk_norm="rms", rope=True, bias=True, causal=False),
    dict(qk_norm="rms", rope=False, bias=False, causal=True),
    dict(qk_norm="rms_gain", rope=True, bias=True, causal=True),
    dict(qk_norm="rms_gain", rope=False, bias=False, causal=False),
]


def _ids(options):
    return "-".join(str(v) if k == "qk_norm" else k for k, v in options.items() if v)


def _positions(config, on=True, index=None):
    index = np.arange(T, dtype=np.int32)[None] if index is None else index
    return rope.positions(index, config.rope_dim, BASE if on else None)


def _input(seed=0):
    return np.random.default_rng(seed).standard_normal((B, T, D))


@pytest.fixture
def build(make_mechanism, randomise):
    """A function of a mechanism's name and keys: config, module, weights (none zero)."""

    def build(name, **keys):
        config = make_mechanism(name, **keys)
        return config, *randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)))

    return build


@pytest.mark.parametrize("options", quick.only([OPTIONS[2]], OPTIONS), ids=_ids)
@pytest.mark.parametrize("mechanism_name", quick.only(_PROJECTED, MECHANISMS))
def test_equals_the_reference(x64, build, mechanism_name, options):
    config, module, weights = build(
        mechanism_name, qk_norm=options["qk_norm"], bias=options["bias"], norm_epsilon=1e-2
    )
    x = _input()
    positions = _positions(config, options["rope"])
    y = jax.jit(lambda x: module(x, positions, causal=options["causal"]))(x)
    expected = reference.attention(
        config, weights, x, base=BASE if options["rope"] else None, causal=options["causal"]
    )
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", quick.only([OPTIONS[4]], OPTIONS), ids=_ids)
@pytest.mark.parametrize(
    "mechanism_name", quick.only(("lrkv_latent_bias", *_PROJECTED), MECHANISMS)
)
def test_projections_equal_the_reference(x64, build, mechanism_name, options):
    """Queries, keys and values themselves: the output alone is blind to some changes of both."""
    config, module, weights = build(
        mechanism_name, qk_norm=options["qk_norm"], bias=options["bias"], norm_epsilon=1e-2
    )
    x, positions = _input(), _positions(config, options["rope"])

    def projected(x):
        q, raw = module.mechanism.project(x, positions)
        return q, *module.mechanism.keys_values(raw, positions)

    q, k, v = map(np.asarray, compiled(projected, x))
    arguments = (config, weights["mechanism"], x, np.arange(T), BASE if options["rope"] else None)
    expected = reference.queries_keys_values(*arguments)
    N, K = config.query_heads, k.shape[2]
    assert q.shape == (B, T, N, config.query_dim)
    assert k.shape == (B, T, K, config.query_dim)
    assert v.shape == (B, T, K, config.value_dim)
    assert N % K == 0
    temperature = 1.0
    if "position_map" in weights["mechanism"]:  # the "+": its channels come last
        temperature = weights["mechanism"]["position_map"].mean()
    for n, (q_n, k_n, v_n) in enumerate(zip(*expected, strict=True)):
        H = q_n.shape[-1]
        close = dict(rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(q[:, :, n, :H], q_n * temperature, **close)
        np.testing.assert_allclose(k[:, :, n * K // N, :H], k_n, **close)
        np.testing.assert_allclose(v[:, :, n * K // N], v_n, **close)

    # The "+" leaves out a term that is constant over a row, since softmax ignores it.
    def centred(z):
        return z - z.mean(-1, keepdims=True)

    for n, z_n in enumerate(reference.attention_maps(*arguments)):
        z = config.scale * np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n * K // N])
        if temperature == 1.0:
            np.testing.assert_allclose(z, z_n, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(centred(z), centred(z_n), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mechanism_name", quick.only(KINDS, MECHANISMS))
def test_float32_is_near_float64(make_mechanism, randomise, mechanism_name):
    config = make_mechanism(mechanism_name)
    module, narrow = randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)), dtype=np.float32)
    x, positions = _input().astype(np.float32), _positions(config)
    modes = dict.fromkeys(((True, 0), (True, 3), (False, 0)))

    def run(x):
        return [module(x, positions, causal=causal, query_chunk=n) for causal, n in modes]

    wide = jax.tree.map(np.float64, narrow)
    for (causal, _), y in zip(modes, jax.jit(run)(jnp.asarray(x)), strict=True):
        assert y.dtype == jnp.float32
        expected = reference.attention(config, wide, np.float64(x), base=BASE, causal=causal)
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


class Outputs:
    """Outputs of a mechanism for several tests, from one program: inputs are [1 + T, T, D].

    Row 0 is an input; row 1 + s differs from it in token s.
    """

    def __init__(self, config, module):
        self.config, self.x = config, np.repeat(_input()[:1], 1 + T, axis=0)
        self.x[np.arange(1, 1 + T), np.arange(T)] += _input()[1]
        modes = dict(whole=(True, 0), chunked=(True, 3), full=(False, 0), full_chunked=(False, 3))

        @jax.jit
        def run(x, index):
            positions = _positions(config, index=index)
            return {
                name: module(x, positions, causal=causal, query_chunk=query_chunk)
                for name, (causal, query_chunk) in modes.items()
            }

        self._run = run
        self.near = self.at(np.arange(T))

    def at(self, index):
        """Returns outputs by mode, with tokens at these positions."""
        outputs = self._run(jnp.asarray(self.x), jnp.asarray(index, jnp.int32)[None])
        return jax.tree.map(np.asarray, outputs)


@pytest.fixture(scope="module")
def outputs_of(make_mechanism, randomise):
    """A function from a mechanism's name to its `Outputs`, which its tests share."""

    @functools.cache
    def outputs_of(name):
        config = make_mechanism(name)
        with jax.enable_x64(True):
            module, _ = randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)))
            return Outputs(config, module)

    return outputs_of


@pytest.mark.parametrize("mechanism_name", quick.only(KINDS, MECHANISMS))
def test_causality(x64, outputs_of, mechanism_name):
    """Output t depends on input s if and only if s <= t, in chunks or not."""
    lower = np.tril(np.ones((T, T), bool))
    for name in ("whole", "chunked"):
        y = outputs_of(mechanism_name).near[name]
        moved = np.abs(y[1:] - y[0]).max(-1)  # [T input, T output]
        np.testing.assert_array_equal(moved.T > 1e-9, lower)
        assert moved.T[~lower].max() < 1e-14


@pytest.mark.parametrize("mechanism_name", quick.only(KINDS, MECHANISMS))
def test_query_chunk_changes_nothing(x64, outputs_of, mechanism_name):
    near = outputs_of(mechanism_name).near
    np.testing.assert_allclose(near["chunked"], near["whole"], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(near["full_chunked"], near["full"])
    assert np.abs(near["full"] - near["whole"]).max() > 1e-3


def test_query_chunk_saves_work():
    """With chunks of an eighth, queries read 9/16 of the keys on average."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)

    def flops(query_chunk):
        def f(q, k, v):
            return softmax_attention(q, k, v, causal=True, query_chunk=query_chunk)

        return jax.jit(f).lower(q, q, q).cost_analysis()["flops"]

    assert flops(32) < 0.62 * flops(0)


@pytest.mark.parametrize("mechanism_name", quick.only(KINDS, MECHANISMS))
def test_shifting_all_positions_changes_nothing(x64, outputs_of, mechanism_name):
    outputs = outputs_of(mechanism_name)
    near, far = outputs.near["whole"], outputs.at(np.arange(T) + 1000)["whole"]
    if getattr(outputs.config, "position_channels", 0):  # the "+" knows where a key stands
        assert np.abs(far - near).max() > 1e-3
    else:
        np.testing.assert_allclose(far, near, rtol=1e-9, atol=1e-9)
    assert np.abs(outputs.at(np.arange(T) * 3)["whole"] - near).max() > 1e-3


@pytest.mark.parametrize("mechanism_name", quick.only(quick.READERS, MECHANISMS))
@pytest.mark.parametrize("new", quick.only([1], [1, 4]), ids=["step", "prefill"])
def test_products_over_a_cache_are_as_precise_as_the_model(build, mechanism_name, new):
    """Products have the device's highest precision for a float32 model, else its default."""
    config, module, _ = build(mechanism_name)
    graph, state = nnx.split(module)
    first_B = jnp.zeros(B, jnp.int32)

    def inputs(weights, x_BTD):
        mechanism = nnx.merge(graph, weights).mechanism
        positions = _positions(config, index=np.arange(new, dtype=np.int32)[None])
        return mechanism.decode_inputs(mechanism.project(x_BTD, positions)[0], BASE)

    highest = (jax.lax.Precision.HIGHEST,) * 2
    for dtype, expected in ((jnp.float32, highest), (jnp.bfloat16, None)):

        def cast(w, dtype=dtype):
            return jax.ShapeDtypeStruct(w.shape, dtype)

        x_BTD = jax.ShapeDtypeStruct((B, new, D), dtype)
        operands = jax.eval_shape(inputs, jax.tree.map(cast, state), x_BTD)
        layer = cache.abstract([config], batch=B, capacity=128, dtype=jnp.dtype(dtype)).layers[0]
        attend = functools.partial(decode_attention, implementation="xla")
        precisions = _precisions(jax.make_jaxpr(attend)(operands, layer, first_B).jaxpr)
        assert set(precisions) == {expected}


def test_absorbed_queries_are_float32(build):
    """In bfloat16, logits are as exact as with keys rebuilt by up_key."""
    config, module, _ = build("mla")
    mechanism = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), module.mechanism)
    shape = (B, T, config.num_heads, config.query_dim)
    q = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.bfloat16)
    inputs = compiled(lambda q: mechanism.decode_inputs(q, BASE), q)
    content, up_key = (np.asarray(x, np.float64) for x in (q, mechanism.up_key[...]))
    absorbed = np.einsum("btnh,cnh->btnc", content[..., : config.key_dim], up_key)
    assert inputs.query.dtype == jnp.float32
    np.testing.assert_allclose(inputs.query, absorbed, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(inputs.rope_query, q[..., config.key_dim :])


def _precisions(jaxpr) -> list:
    """Returns the precisions of all products in a jaxpr and in its inner jaxprs."""
    own = [e.params["precision"] for e in jaxpr.eqns if e.primitive is jax.lax.dot_general_p]
    return sum(map(_precisions, jax.extend.core.subjaxprs(jaxpr)), own)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_output_starts_at_zero(make_mechanism, family):
    config = make_mechanism(family, bias=True)

    @jax.jit
    def run(x):
        module = Attention(config, D, rngs=nnx.Rngs(0))
        y = module(x, _positions(config), causal=True)
        return module.out[...], module.out_bias[...], y, nnx.to_pure_dict(nnx.state(module))

    *zeros, weights = run(jnp.asarray(_input(), jnp.float32))
    assert all(np.all(np.asarray(a) == 0) for a in zeros)
    assert np.all(np.asarray(weights["mechanism"]["query"]) != 0)


@pytest.mark.parametrize(
    "K, H, Hv, query_chunk",
    quick.every(
        5,
        [
            (K, *dims, chunk)
            for K in (1, 2, 6)
            for dims in ((4, 4), (4, 6), (6, 4))
            for chunk in (0, 2, T, 100)
        ],
    ),
)
def test_softmax_attention(x64, K, H, Hv, query_chunk):
    """Logits scale by 1/sqrt(H) of the true key dim, padded or not; head n reads n·K/N."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, *s)) for s in ((6, H), (K, H), (K, Hv)))
    attend = jax.jit(functools.partial(softmax_attention, causal=True, query_chunk=query_chunk))
    o = attend(*map(jnp.asarray, (q, k, v)))
    assert o.shape == (B, T, 6, Hv)
    for n in range(6):
        z = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n * K // 6]) / np.sqrt(H)
        p = np.exp(z) * np.tril(np.ones((T, T)))[None]
        expected = p / p.sum(-1, keepdims=True) @ v[:, :, n * K // 6]
        np.testing.assert_allclose(o[:, :, n], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [2, 6])
def test_alibi_is_exact_in_bfloat16(make_mechanism, heads):
    """The channels of queries and keys add slope times distance, also at large distances."""
    options = dict(num_heads=heads, num_kv_heads=heads, num_bases=heads, rank=0, qk_norm="none")
    config = make_mechanism("mha", alibi=True, **options)
    places = rope.positions(np.array([[0, 255, 40_001, 65_537, 70_000]]), config.rope_dim, None)
    graph, state = nnx.split(config.build(16, rngs=nnx.Rngs(0)))
    mechanism = nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), state))
    x_BTD = jnp.zeros((1, 5, 16), jnp.bfloat16)

    def projected(x_BTD):
        q_BTNH, raw = mechanism.project(x_BTD, places)
        return q_BTNH, mechanism.keys_values(raw, places)[0]

    q_BTNH, k_BTNH = compiled(projected, x_BTD)
    assert q_BTNH.dtype == k_BTNH.dtype == jnp.bfloat16

    def exact(x):
        return np.asarray(x, np.float64)

    z_NTS = config.scale * np.einsum("btnh,bsnh->nts", exact(q_BTNH), exact(k_BTNH))
    fallen_NS = z_NTS[:, 4] - z_NTS[:, 4, 4:]
    expected = reference.alibi_slopes(heads)
    distances = 70_000 - np.array([0, 255, 40_001, 65_537, 70_000])
    np.testing.assert_allclose(fallen_NS, -np.outer(expected, distances), rtol=1e-4)


LRKV_FIELDS = ("base_key", "base_value", "residual_key", "residual_value")
MESH = types.SimpleNamespace(shape=dict(sequence=2))  # two devices split a row


def test_context_parallelism_gathers_latents(x64, build, monkeypatch):
    """A device gathers cache entries of its heads, computed once per token; tokens in any order."""
    shardings = []

    def constrain(x, mesh, *axes):
        shardings.append((x.shape, axes))
        return x

    monkeypatch.setattr(attention, "constrain", constrain)
    order_T = np.array([4, 1, 0, 6, 3, 5, 2, 7])
    segment_ids_BS = jnp.asarray([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 2, 2]])
    x = np.random.default_rng(2).standard_normal((B, len(order_T), D))
    batch = ("data", "fsdp")

    def attend(q, k, v, *, mesh, **options):
        assert mesh is MESH
        return softmax_attention(q, k[:B], v[B:], **options)  # keys of device 0, values of device 1

    for name, fields in (
        ("lrkv_gqa", dict.fromkeys(LRKV_FIELDS, ("tensor",))),
        ("mqa", dict(base_key=(), base_value=())),  # one head is whole everywhere
        ("mlra", dict(latent=(None, "tensor"), rope_key=())),
    ):
        config, module, _ = build(name)

        def positions(order, config=config):
            return _positions(config, index=order[None].astype(np.int32))

        options = dict(causal=True, segment_ids_BS=segment_ids_BS)

        def split(x, m=module, positions=positions, options=options):
            return m(x, positions(order_T), mesh=MESH, **options)

        with monkeypatch.context() as patch:
            patch.setattr(attention, "softmax_attention", attend)
            run = jax.jit(split) if name == "lrkv_gqa" else functools.partial(jax.eval_shape, split)
            outputs = run(x[:, order_T])
        if name == "lrkv_gqa":
            expected = compiled(module, x, positions(np.arange(len(order_T))), **options)
            np.testing.assert_allclose(outputs, expected[:, order_T], rtol=1e-10, atol=1e-10)
        expected = []
        for field, heads in fields.items():
            shape = (B, len(order_T), *config.entry()[field].shape)
            expected += [
                (shape, (batch, "sequence", *heads)),
                (shape, (batch, None, *heads)),
                ((2, *shape), ("sequence", batch, None, *heads)),
                ((2 * B, *shape[1:]), (("sequence", *batch), None, *heads)),
            ]
        assert shardings == expected
        shardings.clear()
