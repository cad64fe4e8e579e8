"""A small model's training step on meshes of up to eight devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.distributed import sharding
from kvjax.distributed.sharding import MeshConfig
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.optim import OptimizerConfig, make_optimizer
from kvjax.training.program import train_step

D, B, T, V, LAYERS = 16, 8, 8, 20, 3
MESHES = {
    "one": dict(fsdp=1),
    "fsdp8": dict(fsdp=8),
    "data2_fsdp4": dict(data=2, fsdp=4),
    "fsdp4_tensor2": dict(fsdp=4, tensor=2),
    "fsdp4_sequence2": dict(fsdp=4, sequence=2),
    "data2_sequence2_tensor2": dict(data=2, fsdp=1, sequence=2, tensor=2),
    "sequence4_fsdp2": dict(fsdp=2, sequence=4),
}


def mesh(name):
    config = MeshConfig(**MESHES[name])
    size = math.prod((config.data, config.fsdp, config.sequence, config.tensor))
    return sharding.make_mesh(config, jax.devices()[:size])


def model(mechanism):
    block = BlockConfig(num_layers=LAYERS, d_model=D, mlp_dim=32, norm_gain=True)
    return TransformerConfig(block=block, mechanisms=(mechanism,) * LAYERS, vocab_size=V)


class Step:
    """A jitted training step on a mesh, and a state to start it from."""

    def __init__(
        self,
        config,
        params,
        mesh,
        dtype,
        parts=1,
        masked=False,
        begins=None,
        compiler_options=None,
        **compute,
    ):
        shapes, axes = parameters.abstract(config)
        several = mesh.size > 1
        optimizer = make_optimizer(
            OptimizerConfig(newton_schulz_steps=2),
            axes,
            d_model=D,
            num_steps=20,
            muon_dtype=jnp.dtype(dtype),
            shardings=sharding.parameter_shardings(mesh, shapes, axes) if several else None,
        )
        params = jax.tree.map(lambda x: np.asarray(x, dtype), params)
        key = jax.random.key_data(jax.random.key(0))
        optimizer_state = jax.jit(optimizer.init)(params)
        state = dict(params=params, optimizer=optimizer_state, step=np.int32(0), key=key)
        shardings = sharding.state_shardings(mesh, shapes, axes, state)
        graph = parameters.graph(config)
        compute = dict(loss_chunks=2) | compute
        compute = Compute(dtype=jnp.dtype(dtype), mesh=mesh if several else None, **compute)
        options = dict(graph=graph, optimizer=optimizer, compute=compute, accumulation_steps=parts)
        options |= dict(masked=masked, bos_id=begins)
        step = functools.partial(train_step, **options)
        self.jitted = jax.jit(
            step, out_shardings=(shardings, None), compiler_options=compiler_options
        )
        self.state = jax.device_put(state, shardings)
        self.rows = sharding.batch_sharding(mesh)

    def __call__(self, rows):
        self.state, metrics = self.jitted(self.state, jax.device_put(rows, self.rows))
        return [float(metrics["loss"]), float(metrics["grad_norm"])]

    def compiled_text(self, rows):
        return self.jitted.lower(self.state, jax.device_put(rows, self.rows)).compile().as_text()


def rows(steps):
    return np.random.default_rng(0).integers(0, V, (steps, B, T + 1), np.int32)
