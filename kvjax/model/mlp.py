"""The MLP of a block: D -> M -> D."""

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.layers.weight import linear, weight


class MLP(nnx.Module):
    """Computes f(x W_up) W_down, or (f(x W_gate) * (x W_up)) W_down with "swiglu" and "geglu".

    f is silu for "swiglu", gelu for "geglu" and "gelu" (both in the tanh approximation), exact gelu
    for "gelu_exact", relu for "relu", and relu^2 for "relu2".
    W_down starts at zero in the default recipe.
    """

    def __init__(self, d_model: int, mlp_dim: int, *, activation: str, bias: bool, rngs: nnx.Rngs):
        sizes = dict(D=d_model, M=mlp_dim)
        self.activation = activation
        self.up = weight("D -> M", rngs, **sizes)
        is_gated = activation in ("swiglu", "geglu")
        self.gate = weight("D -> M", rngs, **sizes) if is_gated else None
        self.down = weight("M -> D", rngs, init="output", **sizes)
        self.up_bias = weight("M", rngs, init="zeros", **sizes) if bias else None
        self.down_bias = weight("D", rngs, init="zeros", **sizes) if bias else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = linear(self.hidden(x_BTD), self.down[...])
        return y_BTD if self.down_bias is None else y_BTD + self.down_bias[...][None, None]

    def hidden(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the activations before W_down, [B, T, M]."""
        h_BTM = linear(x_BTD, self.up[...])
        if self.up_bias is not None:
            h_BTM = h_BTM + self.up_bias[...][None, None]
        if self.activation == "relu2":
            h_BTM = jnp.square(jax.nn.relu(h_BTM))
        elif self.activation == "relu":
            h_BTM = jax.nn.relu(h_BTM)
        elif self.activation in ("gelu", "gelu_exact"):
            h_BTM = jax.nn.gelu(h_BTM, approximate=self.activation == "gelu")
        else:
            f = jax.nn.silu if self.activation == "swiglu" else jax.nn.gelu
            h_BTM = f(linear(x_BTD, self.gate[...])) * h_BTM
        return h_BTM
