"""Eight CPU devices, a compilation cache, small mechanisms, and float64 references in NumPy.

The references are written from the papers' equations, one head at a time, and share nothing with
the product but the names of the weights.
"""

import os

from tests import quick

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS")
_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{_DEVICES} {quick.XLA_FLAGS} {_flags or ''}"

import math
import signal
import types

from etils import epath
from flax import nnx
import fsspec
from fsspec.implementations import dirfs
import jax
import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from kvjax.attention import LatentConfig
from kvjax.attention import RebuiltLatentConfig
from kvjax.foundation import runtime
from kvjax.layers.weight import Axes

jax.config.update("jax_numpy_rank_promotion", "raise")
for _key, _value in quick.compilation_cache().items():
    jax.config.update(_key, _value)
    os.environ.setdefault(_key.upper(), str(_value))  # what tests start finds it, and adds to it
jax.devices()  # reads XLA_FLAGS; processes that tests start see the machine as it is
if _flags is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = _flags

# Under nohup, or in the background of a script, these are ignored, also by what tests start.
for _signal in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, lambda number, frame: None)


@pytest.fixture(scope="module", autouse=True)
def no_program_outlives_its_tests():
    """The programs of all tests together are gigabytes."""
    yield
    jax.clear_caches()


MECHANISMS = {
    "mha": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0)),
    "gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0)),
    "mqa": (GroupedConfig, dict(num_kv_heads=1, num_bases=1, rank=0)),
    "lrkv": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3)),
    "lrkv_gqa": (GroupedConfig, dict(num_heads=8, num_kv_heads=4, num_bases=2, rank=3)),
    "thin_keys": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, key_dim=4)),
    "lrkv_wide_keys": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6)),
    "lrkv_shared_rope": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6, rope="shared"),
    ),
    "kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="kv")),
    "kv_tied_gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, tie="kv")),
    "lrkv_kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, tie="kv")),
    "qk_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", value_dim=6)),
    "qkv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv")),
    "qk_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", position_channels=6),
    ),
    "qkv_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv", position_channels=6),
    ),
    "mla": (LatentConfig, dict(latent_dim=10, rope_key_dim=4, value_dim=6)),
    "mla_paper": (RebuiltLatentConfig, dict(latent_dim=10)),
}
FAMILIES = ("mha", "gqa", "mqa", "lrkv", "mla", "mla_paper")


@pytest.fixture(scope="session")
def make_mechanism():
    """A function of a name above and config keys: the mechanism's config, 4 heads of 8."""

    def make(name, **keys):
        cls, own = MECHANISMS[name]
        return cls(**(dict(num_heads=4, key_dim=8, value_dim=8) | own | keys))

    return make


@pytest.fixture(params=MECHANISMS)
def mechanism_name(request):
    """Every mechanism, and the shapes that only some of its code sees."""
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    """One name per mechanism that the papers compare."""
    return request.param


@pytest.fixture
def x64():
    """64-bit types for the length of one test."""
    with jax.enable_x64(True):
        yield


def random_values(state, seed=0, dtype=np.float64):
    """Values for every variable of an nnx.State, none of them zero, as a pure dict.

    A recipe starts with zeros in its output projections; with those, everything passes. Matrices
    are N(0, 1/in); vectors (gains, biases) lie in [0.5, 1.5].
    """
    rng = np.random.default_rng(seed)

    def draw(variable):
        axes, shape = Axes.parse(variable.axes), variable.shape
        if not axes.is_matrix and "V" not in axes.names and "T" not in axes.names:
            return rng.uniform(0.5, 1.5, shape).astype(dtype)
        first = len(shape) - len(axes.reduction) - len(axes.output)
        fan_in = math.prod(shape[first : first + len(axes.reduction)])
        return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(dtype)

    is_variable = lambda v: isinstance(v, nnx.Variable)
    values = nnx.to_pure_dict(jax.tree.map(draw, state, is_leaf=is_variable))
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(values))
    return values


@pytest.fixture(scope="session")
def randomise():
    """A function of a function that builds a module: (module, weights), no weight zero.

    The module is never computed, so nothing depends on its initialisation.
    """

    def build(make, *, seed=0, dtype=np.float64):
        graph, state = nnx.split(nnx.eval_shape(make))
        weights = random_values(state, seed, dtype)
        return nnx.merge(graph, jax.tree.map(jax.numpy.asarray, weights)), weights

    return build


class _Buckets(dirfs.DirFileSystem):
    """Google's buckets as the folders of a folder."""

    def _join(self, path):
        if isinstance(path, str):
            path = path.removeprefix("gs://")
        return super()._join(path)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The folder whose folder `x` is what epath finds at gs://x."""
    folder = tmp_path / "buckets"
    folder.mkdir()
    system = _Buckets(str(folder), fsspec.filesystem("file", auto_mkdir=True))
    monkeypatch.setattr(type(epath.backend.fsspec_backend), "fs", lambda self, path: system)
    monkeypatch.setitem(runtime.BUCKETS, "gs", ("fsspec", ""))
    return folder


# -- references ------------------------------------------------------------------------------------


def _rotate(x_BTH, positions_T, base):
    """Channel pair (i, i + H/2) of position t turns by t / base^(2i/H)."""
    H = x_BTH.shape[-1]
    out = np.empty_like(x_BTH)
    for i in range(H // 2):
        angle = positions_T.astype(np.float64) * base ** (-2 * i / H)
        c, s = np.cos(angle)[None], np.sin(angle)[None]
        a, b = x_BTH[..., i], x_BTH[..., i + H // 2]
        out[..., i], out[..., i + H // 2] = a * c - b * s, b * c + a * s
    return out


def _rms(x, epsilon, gain=None):
    y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
    return y if gain is None else y * gain


def _heads(config, w, x_BTD):
    """Per query head: query, key and value before norm and rotation, the key as a list of parts.

    Yields (q, [base, residual] or [key], v) of each query head, float64, for the grouped family
    and `mla_paper`.
    """
    affine = lambda name, head: (
        x_BTD @ w[name][:, head] + (w[f"{name}_bias"][head] if f"{name}_bias" in w else 0.0)
    )
    for n in range(config.num_heads):
        if isinstance(config, RebuiltLatentConfig):
            latent = x_BTD @ w["down"]
            yield affine("query", n), [latent @ w["up_key"][:, n]], latent @ w["up_value"][:, n]
            continue
        k_head = n * config.num_kv_heads // config.num_heads
        base = k_head * config.num_bases // config.num_kv_heads
        parts = {}
        for kind in ("key", "value") if config.tie in ("none", "qk") else ("key",):
            parts[kind] = [affine(f"base_{kind}", base)]
            if config.rank:
                latent = x_BTD @ w[f"latent_{kind}"][:, k_head]
                parts[kind].append(latent @ w[f"expand_{kind}"][k_head])
        k = parts["key"]
        q = sum(k) if config.tie in ("qk", "qkv") else affine("query", n)
        yield q, k, sum(parts.get("value", k))


def _queries_keys_values(config, w, x_BTD, positions_T, base):
    """Lists over the query heads of [B, T, H] queries, keys and values.

    With `rope="shared"` a key is [rotated base, residual], a query [rotated, unrotated].
    """
    gain = lambda name: w[name]["gain"] if config.qk_norm == "rms_gain" else 1.0
    norm = lambda y, name: (
        y if config.qk_norm == "none" else _rms(y, config.norm_epsilon, gain(name))
    )
    rotate = lambda y: y if base is None else _rotate(y, positions_T, base)
    result = []
    if isinstance(config, LatentConfig):
        latent = _rms(x_BTD @ w["down"], config.norm_epsilon, gain("latent_norm"))
        shared = rotate(norm(x_BTD @ w["rope_key"], "rope_key_norm"))
        for n in range(config.num_heads):
            content = norm(x_BTD @ w["query"][:, n], "query_norm")
            position = rotate(norm(x_BTD @ w["rope_query"][:, n], "rope_query_norm"))
            q = np.concatenate([content, position], -1)
            k = np.concatenate([latent @ w["up_key"][:, n], shared], -1)
            result.append((q, k, latent @ w["up_value"][:, n]))
    else:
        for q, parts, v in _heads(config, w, x_BTD):
            q = norm(q, "query_norm")
            if getattr(config, "rope", "full") == "shared" and len(parts) == 2:
                rms = 1.0
                if config.qk_norm != "none":
                    rms = np.sqrt(np.mean(sum(parts) ** 2, -1, keepdims=True) + config.norm_epsilon)
                own, residual = (y / rms * gain("key_norm") for y in parts)
                q, k = [rotate(q), q], [rotate(own), residual]
                result.append((np.concatenate(q, -1), np.concatenate(k, -1), v))
            else:
                result.append((rotate(q), rotate(norm(sum(parts), "key_norm")), v))
    return [list(column) for column in zip(*result, strict=True)]


def _encoding(positions_T, channels):
    """[T, C]: sines in even channels, cosines in odd ones (Vaswani et al., section 3.5)."""
    out = np.empty((len(positions_T), channels))
    for i in range(channels):
        angle = positions_T / 10_000 ** (2 * (i // 2) / channels)
        out[:, i] = np.cos(angle) if i % 2 else np.sin(angle)
    return out


def _attention_maps(config, w, x_BTD, positions_T, base):
    """Per query head, what softmax takes: [B, T, S].

    The "+" of projection sharing (section 2.2): P [T, S, m] is a fixed 2-D encoding; the map is
    broadcast over m channels, added to P, and mapped back by a 1x1 convolution, w/m.
    """
    own_dim = config.query_dim if isinstance(config, LatentConfig) else config.key_dim
    m = getattr(config, "position_channels", 0)
    for q, k, _ in zip(*_queries_keys_values(config, w, x_BTD, positions_T, base), strict=True):
        z_BTS = np.einsum("bth,bsh->bts", q, k) / math.sqrt(own_dim)
        if m:
            e = _encoding(positions_T, m // 2)
            T = len(positions_T)
            p_TSm = np.zeros((T, T, m))
            for t in range(T):
                for s in range(T):
                    p_TSm[t, s] = np.concatenate([e[t], e[s]])
            z_BTS = (z_BTS[..., None] + p_TSm[None]) @ (w["position_map"] / m)
        yield z_BTS


def _softmax(z, axis=-1):
    e = np.exp(z - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _attention(config, weights, x_BTD, *, base, causal, positions_T=None):
    """Softmax attention [B, T, D] from an attention module's weights, head by head."""
    T = x_BTD.shape[1]
    positions_T = np.arange(T) if positions_T is None else positions_T
    y = np.zeros((*x_BTD.shape[:2], weights["out"].shape[-1]))
    given = (config, weights["mechanism"], x_BTD, positions_T, base)
    values = _queries_keys_values(*given)[2]
    for n, (z, v) in enumerate(zip(_attention_maps(*given), values, strict=True)):
        if causal:
            z = np.where(np.tril(np.ones((T, T), bool))[None], z, -np.inf)
        y += _softmax(z) @ v @ weights["out"][n]
    return y + weights.get("out_bias", 0.0)


def _norm(block, w, x):
    """LayerNorm or RMSNorm with whatever gain and bias there is."""
    if block.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = _rms(x, block.norm_epsilon)
    return x * w.get("gain", 1.0) + w.get("bias", 0.0)


def _activations(config, weights, tokens_BT):
    """Final activations [B, T, D] of a Transformer, layer by layer."""
    c = config.block
    x = weights["embedding"][tokens_BT]
    if c.positions == "learned":
        x = x + weights["positions"][: tokens_BT.shape[1]]
    if c.embedding_norm:
        x = _norm(c, weights.get("embedding_norm", {}), x)
    base = c.rope_base if c.positions == "rope" else None
    layers = []
    for (mechanism, length), stack in zip(
        config.segments, weights["segments"].values(), strict=True
    ):
        layers += [(mechanism, jax.tree.map(lambda a, i=i: a[i], stack)) for i in range(length)]
    assert len(layers) == c.num_layers
    for mechanism, w in layers:
        h = _norm(c, w.get("attention_norm", {}), x)
        x = x + _attention(mechanism, w["attention"], h, base=base, causal=c.causal)
        h, m = _norm(c, w.get("mlp_norm", {}), x), w["mlp"]
        up = h @ m["up"] + m.get("up_bias", 0.0)
        if c.activation == "relu2":
            up = np.maximum(up, 0) ** 2
        elif c.activation == "gelu":  # GPT-2's, with tanh
            up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = h @ m["gate"]
            up = gate / (1 + np.exp(-gate)) * up
        x = x + up @ m["down"] + m.get("down_bias", 0.0)
    return _norm(c, weights.get("final_norm", {}), x)


def _logits(config, weights, tokens_BT):
    """[B, T, V] of a Transformer."""
    head = weights["embedding"].T if config.block.tied_head else weights["head"]
    z = _activations(config, weights, tokens_BT) @ head
    cap = config.block.logit_softcap
    return cap * np.tanh(z / cap) if cap else z


def _nats(logits_BTV, targets_BT):
    """[B, T] cross-entropy of the targets."""
    top = logits_BTV.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits_BTV - top).sum(-1)) + top[..., 0]
    return normaliser - np.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]


@pytest.fixture(scope="session")
def reference():
    """NumPy float64 definitions, from the rotation of a pair to the logits of a model."""
    return types.SimpleNamespace(
        rotate=_rotate,
        encoding=_encoding,
        attention=_attention,
        attention_maps=_attention_maps,
        queries_keys_values=_queries_keys_values,
        logits=_logits,
        nats=_nats,
    )
