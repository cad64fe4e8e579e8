"""What runs on the devices: an experiment's initial state, training step and evaluation step."""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from kvjax import costs
from kvjax import sharding
from kvjax.experiment import Experiment
from kvjax.model.loss import mean_loss
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.optim import make_optimizer


class Program:
    """The jitted functions of an experiment on a mesh; a state is a plain tree of arrays.

    State: {"params", "optimizer", "step": int32, "key": the seed's key data}.

    Attributes:
      graph: what `nnx.merge` needs beside params.
      abstract_state: ShapeDtypeStructs with shardings.
      init: key -> state.
      train_step: (state, rows [B, T + 1]) -> (state, metrics); the state passed in is consumed.
      eval_step: (params, rows, token_bytes [V]) -> sums, see `eval_step`.
    """

    def __init__(self, experiment: Experiment, compute: Compute, mesh: jax.sharding.Mesh):
        model = experiment.model
        if mesh.size > 1:
            batch, gathered = sharding.batch_sharding(mesh), sharding.replicated(mesh)
            compute = dataclasses.replace(compute, batch=batch, gathered=gathered)
        _, axes = costs.abstract_parameters(model)
        optimizer = make_optimizer(
            experiment.optimizer,
            axes,
            d_model=model.block.d_model,
            num_steps=experiment.train.num_steps,
            muon_dtype=compute.dtype,
        )

        def init(key: jax.Array) -> dict[str, Any]:
            params = nnx.to_pure_dict(nnx.state(Transformer(model, key)))
            return dict(
                params=params,
                optimizer=optimizer.init(params),
                step=jnp.zeros((), jnp.int32),
                key=jax.random.key_data(key),
            )

        abstract = jax.eval_shape(init, jax.random.key(0))
        shardings = sharding.state_sharding(mesh, axes, abstract)
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(model, jax.random.key(0))))
        self.init = jax.jit(init, out_shardings=shardings)
        static = dict(graph=self.graph, compute=compute)
        parts = experiment.train.grad_accumulation
        self.train_step = jax.jit(
            functools.partial(train_step, optimizer=optimizer, parts=parts, **static),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        self.eval_step = jax.jit(functools.partial(eval_step, **static))


def train_step(state: dict, rows: jax.Array, *, graph, optimizer, compute: Compute, parts: int):
    """One optimizer step.

    Args:
      state: params, optimizer, step, key.
      rows: [B, T + 1] tokens; the gradient is the mean over all B·T targets, taken in `parts`.

    Returns:
      The new state, and {"loss": nats per token, "grad_norm": before clipping,
      "param_norm": after the step}: a state is finite where these are.
    """

    def loss(params, rows):
        model = nnx.merge(graph, params)
        return mean_loss(model, rows[:, :-1], rows[:, 1:], compute=compute)

    value_and_grad = jax.value_and_grad(loss)
    if parts == 1:
        value, grads = value_and_grad(state["params"], rows)
    else:

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, value_and_grad(state["params"], part)), None

        # Part i takes rows i, i + parts, ...: each device keeps the rows it has.
        by_part = rows.reshape(-1, parts, rows.shape[1]).swapaxes(0, 1)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"]))
        total, _ = jax.lax.scan(accumulate, zero, by_part)
        value, grads = jax.tree.map(lambda x: x / parts, total)
    updates, opt_state = optimizer.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    new = dict(
        params=params,
        optimizer=opt_state,
        step=state["step"] + 1,
        key=state["key"],
    )
    norms = dict(grad_norm=optax.global_norm(grads), param_norm=optax.global_norm(params))
    return new, {"loss": value} | norms


def eval_step(params: dict, rows: jax.Array, token_bytes: jax.Array, *, graph, compute: Compute):
    """Sums over the targets that have bytes (specials have none): (nats, bytes, targets)."""
    model = nnx.merge(graph, params)
    targets = rows[:, 1:]
    nats = token_losses(model, rows[:, :-1], targets, compute=compute)
    num_bytes = token_bytes[targets]
    return jnp.sum(nats * (num_bytes > 0)), jnp.sum(num_bytes), jnp.sum(num_bytes > 0)
