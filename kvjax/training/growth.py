"""A trained model gets rows for tokens that its vocabulary lacked: embedding and head grow.

New rows of the embedding are drawn as all were at first, those of the head are zero; so the logits
of the tokens that were there stay what they are, to the bit where the processor sums a product of
the new width in the order of the old. With tied heads the embedding alone grows.
"""

import jax
import jax.numpy as jnp

_AXES = {"embedding": 0, "head": 1}  # in [V, D] and [D, V]


def abstract_before(abstract: dict, vocab_size: int) -> dict:
    """The parameters of a model as they are read before they grow.

    Args:
      abstract: ShapeDtypeStructs with shardings, of the grown model.
      vocab_size: of the model that is read; as many: nothing changes.
    """

    def one(name: str, x):
        axis = _AXES[name]
        if x.shape[axis] == vocab_size:
            return x
        shape = tuple(vocab_size if i == axis else n for i, n in enumerate(x.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_whole_along(x.sharding, axis))

    return abstract | {name: one(name, abstract[name]) for name in _there(abstract)}


def growable(params: dict) -> dict:
    """Those of a model's parameters that may grow; the others are let go."""
    return {name: params[name] for name in _there(params)}


def grow(params: dict, drawn: dict, abstract: dict) -> dict:
    """Parameters with the rows that they lack.

    Args:
      params: as `smaller` asked for them.
      drawn: a new model's embedding and head.
      abstract: of the grown model.
    """

    def one(name: str):
        old, new, axis = params[name], drawn[name], _AXES[name]
        if old.shape == new.shape:
            return old
        zero = name == "head"

        def join(old, new):
            more = jax.lax.slice_in_dim(new, old.shape[axis], None, axis=axis)
            return jnp.concatenate([old, jnp.zeros_like(more) if zero else more], axis)

        return jax.jit(join, out_shardings=abstract[name].sharding)(old, new)

    return params | {name: one(name) for name in _there(params)}


def _there(params: dict) -> list[str]:
    return [name for name in _AXES if params.get(name) is not None]


def _whole_along(sharding: jax.sharding.NamedSharding, axis: int) -> jax.sharding.NamedSharding:
    """A sharding that does not split an axis: what is not there yet may be what makes it divide."""
    spec = [None if i == axis else part for i, part in enumerate(sharding.spec)]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
