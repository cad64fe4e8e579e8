"""Adds rows to a trained model's embedding and head for new tokens.

New rows of the embedding keep their random initialisation; new columns of the head are zero. So the
logits of old tokens do not change, except for rounding if the matrix product sums in another order
at the new width. With a tied head only the embedding grows.
"""

import jax
import jax.numpy as jnp

_VOCABULARY_AXES = {"embedding": 0, "head": 1}  # in [V, D] and [D, V]


def parent_abstract(abstract: dict, vocab_size: int) -> dict:
    """Returns ShapeDtypeStructs, with shardings, for reading the parent's parameters.

    Args:
      abstract: ShapeDtypeStructs of the grown model's parameters.
      vocab_size: vocabulary size of the parent.
    """
    parent = dict(abstract)
    for name in _growable_names(abstract):
        x, axis = abstract[name], _VOCABULARY_AXES[name]
        if x.shape[axis] != vocab_size:
            shape = tuple(vocab_size if i == axis else n for i, n in enumerate(x.shape))
            sharding = _unsharded_along(x.sharding, axis)
            parent[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    return parent


def growable(params: dict) -> dict:
    """Returns the parameters that have a vocabulary axis."""
    return {name: params[name] for name in _growable_names(params)}


def grow(params: dict, initial: dict, abstract: dict) -> dict:
    """Appends the missing rows of the embedding and columns of the head.

    Args:
      params: parameters of the parent.
      initial: newly initialised `growable` parameters of the grown model.
      abstract: ShapeDtypeStructs of the grown model's parameters, with shardings.
    """
    grown = dict(params)
    for name in _growable_names(params):
        old, new, axis = params[name], initial[name], _VOCABULARY_AXES[name]
        if old.shape != new.shape:

            def join(old, new, name=name, axis=axis):
                added = jax.lax.slice_in_dim(new, old.shape[axis], None, axis=axis)
                added = jnp.zeros_like(added) if name == "head" else added
                return jnp.concatenate([old, added], axis)

            grown[name] = jax.jit(join, out_shardings=abstract[name].sharding)(old, new)
    return grown


def _growable_names(params: dict) -> list[str]:
    return [name for name in _VOCABULARY_AXES if params.get(name) is not None]


def _unsharded_along(sharding: jax.sharding.NamedSharding, axis: int) -> jax.sharding.NamedSharding:
    """Replicates the vocabulary axis, since the mesh may not divide the parent's vocabulary."""
    spec = [None if i == axis else name for i, name in enumerate(sharding.spec)]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
