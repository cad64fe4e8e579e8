"""kvjax.decode_attention and KVCache, against mechanisms' own inputs and plain attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.api import decode_attention as internal
from kvjax.layers import rope
from kvjax.library.decode import decode_attention
from kvjax.library.kv_cache import KVCache
from kvjax.library.layouts import LAYOUTS, describe_layout
from tests import quick
from tests.attention import law
from tests.library.test_attention import layer_of
from tests.mechanisms import MECHANISMS

B, S, T, BASE = 2, 128, 2, 100.0
RNG = np.random.default_rng(0)


def _mechanism_inputs(name):
    """Returns a mechanism's decode inputs and its filled cache, of a model with random weights."""
    mechanism = layer_of(name).core.mechanism
    x_BTD = jnp.asarray(RNG.standard_normal((B, 9, 16)))
    index_BT = jnp.arange(9, dtype=jnp.int32)[None]
    positions = rope.positions(index_BT, mechanism.config.rope_dim, BASE)
    q_BTNH, raw = mechanism.project(x_BTD, positions)
    entry = mechanism.encode(raw, positions)
    return mechanism.decode_inputs(q_BTNH[:, -T:], BASE), entry


def _layout(inputs, entry):
    """Returns the name of the layout with these inputs and this entry, or None."""
    names = [
        name
        for name, spec in LAYOUTS.items()
        if spec.inputs is type(inputs)
        and all(
            n in spec.cache and len(spec.cache[n].split()) == x.ndim - 2 for n, x in entry.items()
        )
    ]
    return names[0] if names else None


@pytest.mark.parametrize(
    "name", quick.only(["gqa", "lrkv_gqa", "mla", "tpa", "gla", "lrkv_kv_tied"], MECHANISMS)
)
def test_layouts_are_those_of_the_mechanisms(name):
    """Given a mechanism's arrays by name, the public function returns what models compute."""
    with jax.enable_x64(True):
        inputs, entry = _mechanism_inputs(name)
        layout = _layout(inputs, entry)
        given = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        given.pop("separate_queries", None)  # no input, but a property of Decoder's bases
        given = {key: value for key, value in given.items() if value is not None}
        if layout is None or "bias" in given or not _required(layout) <= given.keys():
            pytest.skip("a variant that the public layouts leave out")
        lengths = jnp.array([9, 6], jnp.int32)
        sizes = {
            letter: size
            for key, x in entry.items()
            for letter, size in zip(LAYOUTS[layout].cache[key].split(), x.shape[2:], strict=True)
            if letter != "1"
        }
        cache = KVCache.allocate(layout, batch=B, capacity=100, dtype=jnp.float64, **sizes)
        cache = cache.append({key: x[:, :5] for key, x in entry.items()})
        cache = cache.append({key: x[:, 5:] for key, x in entry.items()}, jnp.array([4, 1]))
        assert cache.lengths.tolist() == lengths.tolist() and cache.capacity == S
        if layout == "latent":
            given["up_value"] = given["up_value"][0]
        query, scale = given.pop("query"), given.pop("scale")
        options = dict(layout=layout, scale=scale, **given)
        found, lse = decode_attention(
            query, cache.arrays, cache.lengths, **options, return_lse=True
        )
        expected = internal(inputs, cache.arrays, lengths - T, implementation="reference")
        np.testing.assert_allclose(found, expected, atol=1e-12)
        assert lse.shape == found.shape[:3]
        window = decode_attention(query, cache.arrays, cache.lengths, **options, window=2)
        expected = internal(inputs, cache.arrays, lengths - T, window=2)
        np.testing.assert_allclose(window, expected, atol=1e-12)
        capped = dict(softcap=0.3, window=3)
        expected = internal(inputs, cache.arrays, lengths - T, **capped, implementation="reference")
        found, lse_capped = decode_attention(
            query, cache.arrays, cache.lengths, **options, **capped, return_lse=True
        )
        np.testing.assert_allclose(found, expected, atol=1e-12)
        z_BTNS = _capped_logits(inputs, cache.arrays, lengths - T, **capped)
        np.testing.assert_allclose(lse_capped, np.log(np.exp(z_BTNS).sum(axis=-1)), atol=1e-12)
        found = decode_attention(query, cache.arrays, cache.lengths, **options, **capped)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        cache = KVCache.allocate(
            layout, batch=B, capacity=100, dtype=jnp.float64, cache_dtype="int8", **sizes
        )
        cache = cache.append(entry, lengths)
        assert {x.dtype for x in cache.arrays.values()} >= {jnp.dtype("int8"), jnp.dtype("float32")}
        read, _ = law.read_back(cache.arrays)
        expected = internal(inputs, read, lengths - T, **capped, implementation="reference")
        found = decode_attention(query, cache.arrays, cache.lengths, **options, **capped)
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("K", [4, 2])
def test_residual_keys_have_their_own_query(K):
    """Compares with the definition, for absorbed queries (K = N) and for rebuilt keys."""
    N, H, R = 4, 8, 2
    cache = KVCache.allocate("residual", batch=B, capacity=8, dtype=jnp.float32, J=1, K=K, H=H, R=R)
    entry = {
        "base_key": (1, H),
        "base_value": (1, H),
        "residual_key": (K, R),
        "residual_value": (K, R),
        "key_scale": (K, 1),
    }

    def draw(*shape):
        return RNG.standard_normal(shape).astype(np.float32)

    cache = cache.append({key: draw(B, 6, *entry[key]) for key in cache.arrays})
    given = dict(layout="residual", rope_base=BASE, residual_query=draw(B, 1, N, H))
    given |= dict(expand_key=draw(K, R, H), expand_value=draw(K, R, H))
    query = draw(B, 1, N, H)
    found, expected = (
        decode_attention(query, cache.arrays, cache.lengths, implementation=name, **given)
        for name in ("xla", "reference")
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def _capped_logits(inputs, cache, first_B, *, softcap, window):
    """Returns logits [B, T, N, S] by the layout's definition, -inf outside the window."""
    by_token = {name: np.moveaxis(np.asarray(x), -1, 1) for name, x in cache.items()}
    q_BTNH, k_BSKH, _ = map(np.asarray, inputs.expand(by_token))
    k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)
    z_BTNS = softcap * np.tanh(
        inputs.scale / softcap * np.einsum("BTNH,BSNH->BTNS", q_BTNH, k_BSNH)
    )
    last_BT1 = (np.asarray(first_B)[:, None] + np.arange(q_BTNH.shape[1]))[..., None]
    slot_S = np.arange(k_BSNH.shape[1])
    visible_BTS = (slot_S <= last_BT1) & (slot_S > last_BT1 - window)
    return np.where(visible_BTS[:, :, None], z_BTNS, -np.inf)


def _required(layout):
    return set(LAYOUTS[layout].arrays) - set(LAYOUTS[layout].optional)


def test_every_layout_is_met_by_a_mechanism():
    with jax.enable_x64(True):
        found = {_layout(*_mechanism_inputs(name)) for name in MECHANISMS}
    assert found - {None} == LAYOUTS.keys()


def test_plain_attention_and_its_log_sum_exp():
    """Two caches of one sequence, merged by their log-sum-exps, equal the whole."""
    N, K, H = 4, 2, 8
    q_BNH = RNG.standard_normal((B, N, H)).astype(np.float32)
    k_BTKH, v_BTKH = RNG.standard_normal((2, B, 6, K, H)).astype(np.float32)
    cache = KVCache.allocate("grouped", batch=B, capacity=6, dtype=jnp.float32, K=K, H=H)
    whole = cache.append({"base_key": k_BTKH, "base_value": v_BTKH})
    logits = np.einsum("bnh,btnh->bnt", q_BNH, np.repeat(k_BTKH, 2, axis=2)) / np.sqrt(H)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum(
        "bnt,btnh->bnh", p / p.sum(-1, keepdims=True), np.repeat(v_BTKH, 2, axis=2)
    )
    o_BNH = decode_attention(q_BNH, whole.arrays, whole.lengths)
    np.testing.assert_allclose(o_BNH, expected, atol=1e-5)
    parts = []
    for part in (slice(0, 2), slice(2, 6)):
        half = cache.append({"base_key": k_BTKH[:, part], "base_value": v_BTKH[:, part]})
        parts.append(decode_attention(q_BNH, half.arrays, half.lengths, return_lse=True))
    weights = np.exp([lse for _, lse in parts])
    merged = sum(w[..., None] * o for w, (o, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(merged / weights.sum(0)[..., None], expected, atol=1e-5)


GQA = dict(
    query=np.zeros((2, 8, 16)),
    cache={"base_key": np.zeros((2, 4, 16, 128)), "base_value": np.zeros((2, 4, 16, 128))},
    lengths=np.array([1, 2]),
)
WRONG = {
    "heads not last": (
        {"cache": {"base_key": np.zeros((2, 128, 4, 16)), "base_value": np.zeros((2, 128, 4, 16))}},
        r"cache\['base_key'\] has shape \[2, 128, 4, 16\]: expected \[B, K, H, S\] = "
        r"\[2, K, 16, S\]; caches have tokens last: `KVCache.append` writes \[B, T, ...\]",
    ),
    "usual names": (
        {"cache": {"k": np.zeros(1), "v": np.zeros(1)}},
        r"cache 'base_key' is missing. Layout grouped \(MHA, GQA, MQA, thin keys\): key = base_key",
    ),
    "lengths": (
        {"lengths": np.array([1.0, 2.0])},
        r"lengths float32\[2\]: must be int32 \[B\] = \[2\]",
    ),
    "a query without sequences": (
        {"query": np.zeros((8, 16))},
        r"query has shape \[8, 16\]: expected \[B, T, N, H\], or \[B, N, H\] for one token "
        r"\(B sequences, T new tokens, N query heads, H key channels of a head\)",
    ),
    "new tokens in place of sequences": (
        {"query": np.zeros((3, 8, 16))},
        r"cache\['base_key'\] has shape \[2, 4, 16, 128\]: expected \[B, K, H, S\] = "
        r"\[3, K, 16, S\], where B is the query's first axis; caches have",
    ),
    "window": ({"window": -1}, "window = -1: must be positive, or 0 for none"),
    "half a residual": (
        {
            "layout": "tied",
            "cache": {
                "base_key": np.zeros((2, 4, 16, 128)),
                "residual_key": np.zeros((2, 8, 2, 128)),
            },
        },
        r"cache\['residual_key'\] and expand_key: give both, or neither",
    ),
    "softcap": ({"softcap": -1.0}, "softcap = -1.0: must be positive, or 0 for none"),
    "heads": ({"query": np.zeros((2, 6, 16))}, "K = 4 must divide N = 6"),
    "layout": ({"layout": "paged"}, "layout = 'paged': must be one of grouped, residual"),
    "option": ({"rope_base": 1e4}, "rope_base: layout 'grouped' has no such option"),
    "input": ({"expand": np.zeros(1)}, "input 'expand' is unknown"),
    "scale": (
        {
            "layout": "latent",
            "cache": {"latent": np.zeros((2, 16, 128)), "rope_key": np.zeros((2, 4, 128))},
            "rope_query": np.zeros((2, 1, 8, 4)),
            "up_value": np.zeros((16, 8, 4)),
        },
        "scale: layout 'latent' has none",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        decode_attention(**GQA | change)


@pytest.mark.parametrize("change", [{"window": 1}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("return_lse", [True, False])
def test_kernels_have_no_window_and_no_soft_cap(change, return_lse):
    options = dict(implementation="tpu", return_lse=return_lse, **change)
    with pytest.raises(NotImplementedError, match=f"TPU kernels have no {min(change)}: use 'xla'"):
        decode_attention(**GQA, **options)


def test_gpu_kernels_read_no_int4_cache():
    cache = KVCache.allocate("grouped", batch=2, capacity=8, K=2, H=16, cache_dtype="int4")
    assert cache.nbytes == 2 * 128 * 2 * 2 * (8 + 4)
    query = jnp.zeros((2, 2, 16))
    with pytest.raises(NotImplementedError, match="GPU kernels read no int4 cache: use"):
        decode_attention(query, cache.arrays, cache.lengths, implementation="gpu")


def test_mistakes_of_caches_are_named():
    with pytest.raises(UserError, match="cache_dtype = 'fp8': must be one of '', 'int8', 'int4'"):
        KVCache.allocate("grouped", batch=1, capacity=1, K=2, H=4, cache_dtype="fp8")
    with pytest.raises(UserError, match="'int4': layout 'grouped' caches base_key of 17 channels"):
        KVCache.allocate("grouped", batch=1, capacity=1, K=2, H=17, cache_dtype="int4")
    with pytest.raises(ValueError, match="dtype = int8: must be a floating-point dtype; cache_dt"):
        KVCache.allocate("grouped", batch=1, capacity=1, K=2, H=4, dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"J is missing: layout 'residual' needs J \(bases"):
        KVCache.allocate("residual", batch=1, capacity=1, K=2, H=4, R=2)
    with pytest.raises(ValueError, match=r"D: layout 'grouped' has the sizes K \(KV heads"):
        KVCache.allocate("grouped", batch=1, capacity=1, K=2, D=4)
    cache = KVCache.allocate("grouped", batch=2, capacity=1, K=2, H=4)
    with pytest.raises(ValueError, match=r"entry has \['k'\]: must have \['base_key'"):
        cache.append({"k": np.zeros((2, 1, 2, 4))})
    with pytest.raises(ValueError, match=r"\[2, 1, 3, 4\]: expected \[B, T, 2, 4\] with B = 2"):
        cache.append(dict.fromkeys(("base_key", "base_value"), np.zeros((2, 1, 3, 4))))
    for name, spec in LAYOUTS.items():
        assert all(
            key in describe_layout(name) for key in (*spec.cache, *spec.arrays, *spec.numbers)
        )


def test_scales_that_do_not_fit_an_int8_cache():
    cache = KVCache.allocate("grouped", batch=2, capacity=8, K=2, H=32, cache_dtype="int8")
    arrays, q_BTNH = cache.arrays, jnp.ones((2, 1, 4, 32))
    scale = arrays["base_key.scale"]
    without = {name: x for name, x in arrays.items() if name != "base_key.scale"}
    for changed, message in (
        (without, r"cache\['base_key'\] is in int8: cache\['base_key.scale'\] is missing"),
        (arrays | {"basekey.scale": scale}, r"there is no cache\['basekey'\]"),
        (arrays | {"base_key.scale": scale[:, 0]}, r"cache\['base_key.scale'\] has shape \[2, 1, "),
        (
            arrays | {"base_key.scale": scale.repeat(32, 2)},
            r"has shape \[2, 2, 32, 128\]: expec",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(q_BTNH, changed, jnp.array([3, 5]))
    one_scale = arrays | {"base_key.scale": scale[:, :1]}  # for all rows of a token
    assert decode_attention(q_BTNH, one_scale, jnp.array([3, 5])).shape == q_BTNH.shape
