"""Linear attention, tied or not: a recurrence with a state of constant size.

    S_t = λ S_(t-1) + φ(k_t) v_tᵀ        n_t = λ n_(t-1) + φ(k_t)
    y_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ n_t              # projection sharing (arXiv 2606.04032) eq. 5 to 7

with φ(x) = elu(x) + 1 (arXiv 2006.16236). In the tied form q = k = v (projection sharing, section
A.1). The cache of a layer is the state, [N, H, Hv] and [N, H], for a text of any length. The paper
gives S a decay λ and does not mention the normaliser n. Here both decay, so that y is a weighted
mean of values.

Three forms of one function: `parallel` over all pairs of tokens, `recurrent` token by token, and
`chunked` for training, which is parallel within a chunk and recurrent between chunks.
"""

import dataclasses
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.attention import project_heads
from kvjax.attention.mechanism import MAX_DIM, require
from kvjax.foundation.configuration import between
from kvjax.layers.weight import linear, weight

TIES = ("none", "qkv")


class State(NamedTuple):
    """A layer's state: sums over tokens, multiplied by λ at each later token."""

    memory: jax.Array  # sum of φ(k) vᵀ: [B, N, H, Hv]
    weight: jax.Array  # sum of φ(k): [B, N, H]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """N heads of H channels, values of Hv."""

    num_heads: int
    key_dim: int
    value_dim: int
    tie: str = "none"  # "qkv": queries, keys and values are one projection
    decay: float = 1.0  # λ per token; 1: no decay

    def __post_init__(self):
        for key in ("num_heads", "key_dim", "value_dim"):
            between(f"config.attention.{key}", getattr(self, key), 1, MAX_DIM)
        require(self.tie in TIES, "tie", repr(self.tie), f"must be one of {TIES}")
        require(0 < self.decay <= 1, "decay", self.decay, "must be above 0, and at most 1")
        if self.tie == "qkv":
            same = f"needs value_dim = {self.value_dim} equal to key_dim = {self.key_dim}"
            require(self.key_dim == self.value_dim, "tie", repr(self.tie), same)

    def start(self, batch: int, dtype: jnp.dtype = jnp.float32) -> State:
        """Returns the state before the first token, all zeros."""
        shape = (batch, self.num_heads, self.key_dim)
        return State(jnp.zeros((*shape, self.value_dim), dtype), jnp.zeros(shape, dtype))


def feature_map(x: jax.Array) -> jax.Array:
    """Returns elu(x) + 1, computed as exp(x) below 0, where elu(x) + 1 would cancel."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


def parallel(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNV: jax.Array, decay: float = 1.0
) -> jax.Array:
    """Returns outputs [B, T, N, Hv] from all T² pairs of tokens; queries and keys are features."""
    weights_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) * _fading(q_BTNH, decay)
    total_BNT1 = jnp.sum(weights_BNTS, axis=-1, keepdims=True)
    return jnp.einsum("BNTS,BSNV->BTNV", weights_BNTS / total_BNT1, v_BTNV)


def _fading(q_BTNH: jax.Array, decay: float) -> jax.Array:
    """Returns decay weights [1, 1, T, T]: λ^(t - s) for s ≤ t, 0 for later tokens."""
    T = q_BTNH.shape[1]
    since_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    faded = jnp.asarray(decay, q_BTNH.dtype) ** jnp.maximum(since_TS, 0)
    return jnp.where(since_TS >= 0, faded, 0)[None, None]


def recurrent(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNV: jax.Array, decay: float, state: State
) -> tuple[jax.Array, State]:
    """Returns outputs [B, T, N, Hv] token by token, and the state after the last."""

    def step(state: State, token):
        q_BNH, k_BNH, v_BNV = token
        memory = decay * state.memory + k_BNH[..., None] * v_BNV[..., None, :]
        weight = decay * state.weight + k_BNH
        read_BNV = jnp.einsum("BNH,BNHV->BNV", q_BNH, memory)
        total_BN = jnp.einsum("BNH,BNH->BN", q_BNH, weight)
        return State(memory, weight), read_BNV / total_BN[..., None]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q_BTNH, k_BTNH, v_BTNV))
    state, y_TBNV = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(y_TBNV, 0, 1), state


def chunked(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNV: jax.Array,
    decay: float,
    state: State,
    *,
    chunk: int,
) -> tuple[jax.Array, State]:
    """Returns outputs and state like `recurrent`, C tokens at a time: T·C pairs.

    Args:
      chunk: C, tokens; the remainder of T is a chunk of its own.
    """
    B, T, *_ = q_BTNH.shape
    full = T - T % chunk  # tokens in full chunks
    rows, outputs = (q_BTNH, k_BTNH, v_BTNV), []
    if full:

        def by_chunk(x):
            return jnp.moveaxis(x[:, :full].reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

        def step(state, tokens):
            return _one_chunk(state, tokens, decay)

        state, y_GBCNV = jax.lax.scan(step, state, jax.tree.map(by_chunk, rows))
        outputs.append(jnp.moveaxis(y_GBCNV, 0, 1).reshape(B, full, *v_BTNV.shape[2:]))
    if full < T:
        last_chunk = jax.tree.map(lambda x: x[:, full:], rows)
        state, y_BCNV = _one_chunk(state, last_chunk, decay)
        outputs.append(y_BCNV)
    return jnp.concatenate(outputs, axis=1), state


def _one_chunk(state: State, tokens: tuple, decay: float) -> tuple[State, jax.Array]:
    """Returns the state after a chunk [B, C, N, ..], and its outputs."""
    q, k, v = tokens
    C = q.shape[1]
    index_C = jnp.arange(C)
    decay = jnp.asarray(decay, q.dtype)
    pairs_BNCS = jnp.einsum("BCNH,BSNH->BNCS", q, k) * _fading(q, decay)
    faded_q = q * (decay ** (index_C + 1))[None, :, None, None]
    read = jnp.einsum("BNCS,BSNV->BCNV", pairs_BNCS, v)
    read = read + jnp.einsum("BCNH,BNHV->BCNV", faded_q, state.memory)
    total = jnp.einsum("BNCS->BCN", pairs_BNCS)
    total = total + jnp.einsum("BCNH,BNH->BCN", faded_q, state.weight)
    faded_k = k * (decay ** (C - 1 - index_C))[None, :, None, None]
    memory = decay**C * state.memory + jnp.einsum("BCNH,BCNV->BNHV", faded_k, v)
    weight = decay**C * state.weight + jnp.sum(faded_k, axis=1)
    return State(memory, weight), read / total[..., None]


class LinearAttention(nnx.Module):
    """Linear attention from [B, T, D] to [B, T, D], with the state before and after."""

    def __init__(self, config: LinearConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, H=c.key_dim)
        value_sizes = sizes | dict(H=c.value_dim)
        self.key = weight("D -> N H", rngs, **sizes)
        if c.tie == "none":
            self.query = weight("D -> N H", rngs, **sizes)
            self.value = weight("D -> N H", rngs, **value_sizes)
        self.out = weight("N H -> D", rngs, init="output", **value_sizes)

    def __call__(
        self, x_BTD: jax.Array, state: State, *, chunk: int = 64
    ) -> tuple[jax.Array, State]:
        """Continues a text from a state; returns outputs and the new state.

        Args:
          chunk: tokens at a time; 1 is the recurrence.
        """
        k_BTNH = linear(x_BTD, self.key[...])
        if self.config.tie == "none":
            q_BTNH, v_BTNV = linear(x_BTD, self.query[...]), linear(x_BTD, self.value[...])
        else:
            q_BTNH = v_BTNV = k_BTNH
        q_BTNH, k_BTNH = feature_map(q_BTNH), feature_map(k_BTNH)
        tokens = (q_BTNH, k_BTNH, v_BTNV, self.config.decay, state)
        if chunk == 1:
            y_BTNV, state = recurrent(*tokens)
        else:
            y_BTNV, state = chunked(*tokens, chunk=chunk)
        return project_heads(y_BTNV, self.out, None), state
