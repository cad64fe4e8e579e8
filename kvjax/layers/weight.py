"""Weights with named axes, and the linear maps that use them.

`weight("D -> N H", rngs, D=768, N=6, H=128)` is one matrix from D to N x H, stored [D, N, H].
`weight("K: R -> H", ...)` is K independent matrices from R to H, stored [K, R, H].

The string is kept as the parameter's `.axes`. It determines shape and initialisation here, the
matrix that Muon orthogonalises (`kvjax.optim`) and the mesh axes (`distributed.sharding.spec`), so
a new mechanism changes neither optimizer nor sharding.
"""

from collections.abc import Iterable
import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

HEAD_AXES = frozenset("NKJ")
LETTERS = {
    "N": "query heads",
    "K": "KV heads",
    "J": "bases and anything else that groups of heads share",
    "G": "branches, all read by every head",
    "D": "model width",
    "H": "head channels",
    "R": "rank",
    "C": "latent channels",
    "P": "channels of a decoupled RoPE key",
    "M": "MLP width",
    "V": "vocabulary",
    "T": "learned positions",
}


def check_letters(text: str, names: Iterable[str]) -> None:
    """Raises a ValueError for an unknown letter, which no sharding or Muon rule would cover."""
    for name in names:
        if name not in LETTERS:
            known = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
            raise ValueError(f"axes {text!r}: {name!r} is none of {known}")


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a stored weight, in storage order: batch, reduction (in), output.

    Vectors (gains, biases) have output axes only. Stacked layers have an unnamed axis in front.
    """

    batch: tuple[str, ...]
    reduction: tuple[str, ...]
    output: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """Parses "K: R -> H", "D -> N H" or, for a vector, "N H"."""
        batch, _, rest = text.rpartition(":")
        reduction, _, output = rest.rpartition("->")
        axes = cls(tuple(batch.split()), tuple(reduction.split()), tuple(output.split()))
        check_letters(text, axes.names)
        if len(set(axes.names)) < len(axes.names):
            raise ValueError(f"axes {text!r}: a letter is repeated")
        return axes

    @property
    def names(self) -> tuple[str, ...]:
        return self.batch + self.reduction + self.output

    @property
    def is_matrix(self) -> bool:
        return bool(self.reduction)

    def per_head(self) -> "Axes":
        """Returns the axes of the same weight as one matrix per head (and per branch)."""
        head_axes = HEAD_AXES | {"G"}
        heads = tuple(n for n in self.names if n in head_axes and n not in self.batch)
        reduction = tuple(n for n in self.reduction if n not in head_axes)
        output = tuple(n for n in self.output if n not in head_axes)
        return Axes(self.batch + heads, reduction, output)


@dataclasses.dataclass(eq=False)
class InitRngs:
    """Random keys and initialisation defaults for `weight`; a cheaper drop-in for `nnx.Rngs`.

    Returns the same keys as `nnx.Rngs(key)`. It counts them in a Python int, which the traced
    program does not contain; create it inside the function that is jitted or vmapped.
    """

    key: jax.Array
    matrix_std: float = 0.0  # standard deviation of "linear" matrices; 0: from fan in and fan out
    zero_outputs: bool = True  # output projections (init="output") start at zero
    count: int = 0  # keys drawn so far

    def params(self) -> jax.Array:
        """Returns the next key."""
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
    """Creates a parameter.

    Args:
      axes: see the module docstring.
      rngs: keys; an `InitRngs` may also override the initialisation of "linear" and "output".
      init: one of
        "linear": N(0, std) with std = min(1, sqrt(out/in)) / sqrt(in) (arXiv 2310.17813, as in
          nanochat), or `rngs.matrix_std` if positive;
        "output": zeros if `rngs.zero_outputs`, else "linear";
        "normal": N(0, 1); "zeros"; "ones"; a number: N(0, number).
      sizes: length of every axis.
    """
    parsed = Axes.parse(axes)
    shape = tuple(sizes[name] for name in parsed.names)
    defaults = rngs if isinstance(rngs, InitRngs) else InitRngs  # class attributes
    if init == "output":
        init = "zeros" if defaults.zero_outputs else "linear"
    if init == "linear" and parsed.is_matrix and defaults.matrix_std:
        init = defaults.matrix_std
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
    """Draws from N(0, std)."""
    value = jax.random.normal(key, shape, dtype)
    return jax.lax.mul(value, np.asarray(std, value.dtype))  # traces faster than `*`


def axes_of(state: nnx.State) -> dict:
    """Returns the axes strings of a state's parameters as a pure dict."""
    axes = jax.tree.map(lambda p: p.axes, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.to_pure_dict(axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, w: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Computes `jnp.tensordot(x, w, 1)`: [..., in] x [in, *out] -> [..., *out].

    The custom backward pass is for XLA on CPU, which copies the first operand of the weight
    gradient (a product over tokens). It makes the narrower of x and dy the first operand. With
    automatic differentiation, the loss over a vocabulary takes 2 to 3 times as long.

    Args:
      dtype: dtype of accumulation and result; None: the promoted dtype of x and w.
    """
    return jnp.tensordot(x, w, 1, preferred_element_type=dtype)


def _linear_forward(x: jax.Array, w: jax.Array, dtype: jnp.dtype | None):
    # Calls tensordot, not `linear`: the remat policy "dots" recognises dot_general only.
    return jnp.tensordot(x, w, 1, preferred_element_type=dtype), (x, w)


def _linear_backward(dtype: jnp.dtype | None, saved, dy: jax.Array):
    x, w = saved
    dy = dy.astype(jnp.result_type(x, w))  # a float32 dy would make bfloat16 products float32
    tokens, outputs = tuple(range(x.ndim - 1)), w.ndim - 1
    dx = jax.lax.dot_general(
        dy, w, ((tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(1, w.ndim))), ((), ()))
    )
    over_tokens = ((tokens, tokens), ((), ()))
    if w.size <= w.shape[0] ** 2:  # in >= out: dy is the narrower one
        dw = jax.lax.dot_general(dy, x, over_tokens)
        # Without the barrier, XLA on CPU swaps the operands to avoid the transpose, and the product
        # runs at half the speed.
        barrier = jax.lax.optimization_barrier
        dw = jax.lax.platform_dependent(dw, cpu=barrier, default=lambda dw: dw)
        dw = jnp.moveaxis(dw, -1, 0)
    else:
        dw = jax.lax.dot_general(x, dy, over_tokens)
    return dx.astype(x.dtype), dw.astype(w.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def affine(x: jax.Array, w: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """Applies `linear`, then adds the bias [*out] if there is one."""
    return add_bias(linear(x, w[...]), bias)


def add_bias(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Adds a bias [*out] to [..., *out], if there is one."""
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...], tuple(range(y.ndim - bias.ndim)))
