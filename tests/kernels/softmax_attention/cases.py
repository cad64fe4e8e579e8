"""Arrays, meshes, and softmax attention in NumPy and in float64, for the tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.softmax_attention.api import softmax_attention

AXES = ("data", "fsdp", "sequence", "tensor")
FLOAT32, BFLOAT16 = jnp.float32, jnp.bfloat16
T = 384  # three blocks of the minimum size


def arrays(B, N, K, H, Hv, *, length=T, dtype=FLOAT32):
    """Returns queries, keys, values, and weights of the output, rounded to a dtype."""
    rng = np.random.default_rng(0)
    shapes = (length, N, H), (length, K, H), (length, K, Hv), (length, N, Hv)
    return [jnp.asarray(rng.standard_normal((B, *shape)), dtype) for shape in shapes]


def segments(B, length=T):
    """Returns segment ids [B, length] that end inside blocks and at their edges; rows differ."""
    ends = [[100, 128, 300], [1, 256, 257]]

    def find(row):
        return np.searchsorted(ends[row % 2], np.arange(length), side="right")

    return np.stack([find(row) for row in range(B)])


def numpy(q, k, v, sees_BTS, scale=None, softcap=0.0):
    """Returns attention's output [B, T, N, Hv] in float64, head by head in NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    outputs = []
    for n in range(q.shape[2]):
        z = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group])
        z = z * (scale or q.shape[-1] ** -0.5)
        z = softcap * np.tanh(z / softcap) if softcap else z
        z = np.where(sees_BTS, z, -np.inf)
        p = np.exp(z - z.max(-1, keepdims=True))
        outputs.append(p / p.sum(-1, keepdims=True) @ v[:, :, n // group])
    return np.stack(outputs, axis=2)


def run(arrays, **options):
    """Returns the output, and the gradients of queries, keys and values."""

    def f(q, k, v, w):
        o = softmax_attention(q, k, v, **options)
        return (o.astype(jnp.float32 if o.dtype != jnp.float64 else o.dtype) * w).sum(), o

    gradients, o = jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float64) for x in (o, *gradients)]


def exact(arrays, **options):
    """Computes the result in float64 by XLA."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return run(wide, implementation="xla", **options)


def assert_near(got, expected, tolerance):
    for name, x, y in zip(("output", "dq", "dk", "dv"), got, expected, strict=True):
        worst = np.abs(x - y).max() / np.abs(y).max()
        assert worst < tolerance, (name, worst)


def mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)


def shapes(B=2, length=256, N=4, K=2, H=128, Hv=128, dtype=BFLOAT16):
    shapes = (length, N, H), (length, K, H), (length, K, Hv)
    return [jax.ShapeDtypeStruct((B, *shape), dtype) for shape in shapes]


def trace(arrays, **options):
    return jax.eval_shape(
        functools.partial(softmax_attention, **dict(causal=True) | options), *arrays
    )
