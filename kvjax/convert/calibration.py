"""Second moments of what enters each layer's attention, on calibration text."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.convert.layerwise import Pass
from kvjax.convert.model import Model
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError


def moments(model: Model, rows_BT: np.ndarray) -> list[np.ndarray]:
    """[E, E] of every layer: the mean of x x^T over tokens, float32, a 1 after x.

    That 1 is for biases; where a layer has none its row and column are left out.

    Raises:
      UserError: what enters a layer is not finite.
    """
    found, mechanisms = [], model.transformer.mechanisms
    with progress.waiting("calibrating") as doing:
        for i, sums in enumerate(Pass(model, rows_BT).layers(_products)):
            doing.at(f"{i + 1} of {len(mechanisms)} layers")
            total_EE = sum(np.asarray(sum_EE, np.float64) for sum_EE in sums)
            if not np.isfinite(total_EE).all():
                raise UserError(f"layer {i} of {model.name}: its inputs on the text are not finite")
            moment_EE = (total_EE / rows_BT.size).astype(np.float32)
            found.append(moment_EE if mechanisms[i].bias else moment_EE[:-1, :-1])
    return found


def _products(h_BTD: jax.Array) -> jax.Array:
    """[E, E]: the sum of x x^T, a 1 after x."""
    h_BTE = jnp.concatenate([h_BTD, jnp.ones_like(h_BTD[..., :1])], axis=-1)
    return jnp.einsum("BTE,BTF->EF", h_BTE, h_BTE, precision="highest")
