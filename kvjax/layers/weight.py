"""Weights that know their axes, and the linear maps they are.

One string gives a weight's shape, its initialisation and the matrix that Muon orthogonalises.

`weight("D -> N H", rngs, D=768, N=6, H=128)` is a linear map from D to (N, H), stored [D, N, H].
`weight("K: R -> H", ...)` is K separate maps from R to H, stored [K, R, H]. The string stays with
the parameter as `.axes`, and is all that the optimizer (which matrix to orthogonalise) and the
sharding (which axis to split) need to know: a new mechanism adds no line to either.
"""

from collections.abc import Iterable
import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

HEAD_AXES = frozenset("NKJ")  # letters that count heads
LETTERS = dict(
    **dict(N="query heads", K="KV heads", J="bases, and whatever else groups of heads share"),
    **dict(D="model", H="head channels", R="rank", C="latent", P="channels with RoPE alone"),
    **dict(M="MLP", V="vocabulary", T="positions", G="branches, of which each head has all"),
)


def check_letters(text: str, names: Iterable[str]) -> None:
    """Raises a ValueError for a name that is no letter of `LETTERS`: it would mean nothing."""
    for name in names:
        if name not in LETTERS:
            known = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
            raise ValueError(f"axes {text!r}: {name!r} is none of {known}")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a stored weight, in storage order: batch, then reduction, then output.

    A vector (gain, bias) has output axes only. A stack of layers has further, unnamed batch axes
    in front.
    """

    batch: tuple[str, ...]
    reduction: tuple[str, ...]
    output: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """Reads "K: R -> H", "D -> N H" or, for a vector, "N H"."""
        batch, _, rest = text.rpartition(":")
        reduction, _, output = rest.rpartition("->")
        axes = cls(tuple(batch.split()), tuple(reduction.split()), tuple(output.split()))
        check_letters(text, axes.names)
        if len(set(axes.names)) < len(axes.names):
            raise ValueError(f"axes {text!r}: a letter stands there twice")
        return axes

    @property
    def names(self) -> tuple[str, ...]:
        return self.batch + self.reduction + self.output

    @property
    def is_matrix(self) -> bool:
        return bool(self.reduction)

    def per_head(self) -> "Axes":
        """The same weight seen as one matrix per head: head axes, and branches, go to the batch."""
        apart = HEAD_AXES | {"G"}
        keep = lambda names: tuple(n for n in names if n not in apart)
        heads = tuple(n for n in self.names if n in apart and n not in self.batch)
        return Axes(self.batch + heads, keep(self.reduction), keep(self.output))


@dataclasses.dataclass(eq=False)
class InitRngs:
    """Random keys, and how weights start that say no more than what they are.

    It stands wherever `weight` takes nnx.Rngs, which start as the defaults here, and gives the keys
    of nnx.Rngs(key). It counts while a program is traced, in a Python number (an array would be an
    addition in every program, for each weight): make one inside what is compiled or mapped.
    """

    key: jax.Array
    matrix_std: float = 0.0  # of matrices; 0: by their sizes
    zero_outputs: bool = True  # whether projections into the residual stream, and the head, are 0
    count: int = 0  # keys given

    def params(self) -> jax.Array:
        """The next key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)


def weight(
    axes: str,
    rngs: nnx.Rngs | InitRngs,
    *,
    init: str | float = "linear",
    dtype=jnp.float32,
    **sizes: int,
) -> nnx.Param:
    """A parameter with the given axes and sizes.

    Args:
      axes: see the module's docstring; every letter needs a size in `sizes`.
      init: "linear", N(0, min(1, sqrt(out/in))/sqrt(in)) (arXiv 2310.17813, as in nanochat) or what
        `rngs` say of matrices; "output", zeros or, if `rngs` say so, as "linear"; "normal",
        N(0, 1); "zeros"; "ones"; or the standard deviation of a normal distribution.
      sizes: length of each axis.
    """
    parsed = Axes.parse(axes)
    shape = tuple(sizes[name] for name in parsed.names)
    start = rngs if isinstance(rngs, InitRngs) else InitRngs  # the class has its defaults
    if init == "output":
        init = "zeros" if start.zero_outputs else "linear"
    if init == "linear" and parsed.is_matrix and start.matrix_std:
        init = start.matrix_std
    if init in ("zeros", "ones"):
        value = jnp.full(shape, float(init == "ones"), dtype)
    elif init == "normal" or not isinstance(init, str):
        std = 1.0 if init == "normal" else init
        value = _normal(rngs.params(), std, shape, dtype)
    elif init == "linear":
        fan_in = math.prod(sizes[name] for name in parsed.reduction)
        fan_out = math.prod(sizes[name] for name in parsed.output)
        std = min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)
        value = _normal(rngs.params(), std, shape, dtype)
    else:
        allowed = "'linear', 'output', 'normal', 'zeros', 'ones', or a number"
        raise ValueError(f"init={init!r}: allowed are {allowed}")
    return nnx.Param(value, axes=axes)


def _normal(key: jax.Array, std: float, shape: tuple[int, ...], dtype) -> jax.Array:
    """N(0, std)."""
    value = jax.random.normal(key, shape, dtype)
    return jax.lax.mul(value, np.asarray(std, value.dtype))  # sooner traced than a `*`


def axes_of(state: nnx.State) -> dict:
    """The axes strings of a state's parameters, as a pure dict."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.axes, state, is_leaf=is_variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, w: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., in] and [in, *out] to [..., *out], accumulated and returned in `dtype`; None: theirs.

    As `jnp.tensordot(x, w, 1)`, with a weight gradient ordered for XLA on CPU, which copies the
    first operand of a product over tokens: here always the narrower one (derived automatically, a
    vocabulary head's loss takes 2 to 3 times as long). What is transposed afterwards stays so on
    CPU: XLA would swap the operands instead, and that product runs at half the speed.
    """
    return jnp.tensordot(x, w, 1, preferred_element_type=dtype)


def _linear_forward(x: jax.Array, w: jax.Array, dtype: jnp.dtype | None):
    # Not `linear`: remat policies look for products.
    return jnp.tensordot(x, w, 1, preferred_element_type=dtype), (x, w)


def _linear_backward(dtype: jnp.dtype | None, saved, dy: jax.Array):
    x, w = saved
    dy = dy.astype(jnp.result_type(x, w))  # products of operands that are no wider than these
    tokens, outputs = tuple(range(x.ndim - 1)), w.ndim - 1
    dx = jax.lax.dot_general(
        dy, w, ((tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(1, w.ndim))), ((), ()))
    )
    over_tokens = ((tokens, tokens), ((), ()))
    if w.size <= w.shape[0] ** 2:  # in >= out
        dw = jax.lax.dot_general(dy, x, over_tokens)
        keep = jax.lax.optimization_barrier
        dw = jax.lax.platform_dependent(dw, cpu=keep, default=lambda dw: dw)
        dw = jnp.moveaxis(dw, -1, 0)
    else:
        dw = jax.lax.dot_general(x, dy, over_tokens)
    return dx.astype(x.dtype), dw.astype(w.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def affine(x: jax.Array, w: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """`linear`, and [*out] added to it where there is a bias."""
    y = linear(x, w[...])
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...], tuple(range(x.ndim - 1)))
