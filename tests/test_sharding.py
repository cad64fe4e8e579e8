"""One device and eight: the same numbers, an eighth of the bytes each."""

import functools
import re

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from kvjax import costs
from kvjax import experiment as experiment_lib
from kvjax import sharding
from kvjax.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.optim import OptimizerConfig
from kvjax.optim import make_optimizer
from kvjax.program import Program
from kvjax.program import train_step
from kvjax.sharding import MeshConfig
from tests import runs

D, B, T = 16, 8, 8
MESHES = {"one": (1, 1), "fsdp8": (1, 8), "data2_fsdp4": (2, 4), "data8": (8, 1)}


def _mesh(name):
    data, fsdp = MESHES[name]
    return sharding.make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])


@pytest.fixture
def config(make_mechanism):
    block = BlockConfig(num_layers=2, d_model=D, mlp_dim=24, norm_gain=True)
    mechanism = make_mechanism("lrkv", qk_norm="rms_gain")
    return TransformerConfig(block=block, mechanisms=(mechanism,) * 2, vocab_size=20)


def _state(config, params):
    """A training state as the loop has it."""
    _, axes = costs.abstract_parameters(config)
    optimizer = make_optimizer(
        OptimizerConfig(), axes, d_model=D, num_steps=3, muon_dtype=jnp.dtype(jnp.float64)
    )
    state = dict(params=params, optimizer=optimizer.init(params), step=jnp.zeros((), jnp.int32))
    return axes, optimizer, state | dict(key=jax.random.key_data(jax.random.key(0)))


def _names(path):
    return [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]


# The axis of the stored array (layers first) that is D, or the longest, by the weight's name.
SPLIT_AXIS = dict(
    embedding=1,
    head=0,
    query=1,
    base_key=1,
    base_value=1,
    latent_key=1,
    latent_value=1,
    expand_key=3,
    expand_value=3,
    out=3,
    up=1,
    down=2,
)
SPLIT_GAINS = {"attention_norm": 1, "mlp_norm": 1, "embedding_norm": 0, "final_norm": 0}


def _expected_spec(names, ndim):
    axis = SPLIT_AXIS.get(names[-1])
    if names[-1] == "gain":
        axis = SPLIT_GAINS.get(names[-2])  # the gain of a head has no D
    if axis is None or ndim == 0:
        return P(*[None] * ndim)
    return P(*("fsdp" if i == axis else None for i in range(ndim)))


@pytest.mark.parametrize("mesh_name", ["fsdp8", "data2_fsdp4"])
def test_state_lies_as_its_parameters_and_takes_its_share_of_bytes(config, randomise, mesh_name):
    mesh = _mesh(mesh_name)
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    axes, _, state = _state(config, jax.tree.map(jnp.asarray, params))
    shardings = sharding.state_sharding(mesh, axes, state)
    placed = jax.device_put(state, shardings)
    split = 0
    for path, x in jax.tree_util.tree_leaves_with_path(placed):
        spec = _expected_spec(_names(path), x.ndim)
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), x.ndim), (
            path,
            x.sharding,
        )
        ways = mesh.shape["fsdp"] if "fsdp" in spec else 1
        assert len(x.addressable_shards) == 8
        assert all(s.data.nbytes * ways == x.nbytes for s in x.addressable_shards)
        split += ways > 1
    # 12 named weights and 4 gains: 10 matrices have momentum, 6 others two moments each.
    assert split == 16 + 10 + 6 * 2


def test_weights_that_do_not_divide_are_whole():
    mesh = _mesh("fsdp8")
    spec = lambda axes, shape: sharding.parameter_sharding(mesh, axes, shape).spec
    assert spec("D -> N H", (3, 12, 8, 8)) == P(None, None, None, None)
    assert spec("D -> N H", (3, 16, 8, 8)) == P(None, "fsdp", None, None)
    assert spec("N H -> D", (8, 8, 16)) == P(None, None, "fsdp")
    assert spec("K: R -> H", (4, 8, 16)) == P(None, None, "fsdp")
    assert spec("K: R -> H", (8, 4, 12)) == P("fsdp", None, None)
    assert spec("N H", (8, 8)) == P(None, None)


@pytest.mark.parametrize("mesh_name", ["fsdp8", "data2_fsdp4"])
def test_a_device_computes_its_own_rows_only(mesh_name):
    """In the compiled step, no array of three axes or more holds all rows, 32, or 32 x T tokens."""
    config = runs.small_config("unused.txt", "", batch_size=32)
    config.data.sequence_length = 24
    experiment = experiment_lib.resolve(config)
    compute = Compute(remat="full", loss_chunks=2)
    program = Program(experiment, compute, _mesh(mesh_name))
    rows = jax.ShapeDtypeStruct(
        (32, 25), jnp.int32, sharding=sharding.batch_sharding(_mesh(mesh_name))
    )
    text = program.train_step.lower(program.abstract_state, rows).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert any(shape[0] == 4 for shape in shapes)
    # Widths of this model are 16, 32, 64 and 257; 32 is also D, so rows lead and T follows.
    assert not [s for s in shapes if s[:2] in {(32, 24), (32, 12)} or s[0] == 32 * 24]


def test_batches_are_split_over_both_axes():
    for name in ("fsdp8", "data2_fsdp4"):
        rows = jax.device_put(np.zeros((16, 5)), sharding.batch_sharding(_mesh(name)))
        assert {s.data.shape for s in rows.addressable_shards} == {(2, 5)}
        starts = {s.index[0].start or 0 for s in rows.addressable_shards}
        assert starts == set(range(0, 16, 2))


def test_initial_parameters_do_not_depend_on_the_mesh(config):
    init = lambda key: nnx.to_pure_dict(nnx.state(Transformer(config, key)))
    _, axes = costs.abstract_parameters(config)
    results = []
    for name in ("one", "fsdp8"):
        shardings = sharding.state_sharding(
            _mesh(name), axes, jax.eval_shape(init, jax.random.key(0))
        )
        params = jax.jit(init, out_shardings=shardings)(jax.random.key(3))
        results.append(jax.device_get(params))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.ptp(results[0]["embedding"]) > 1


@pytest.fixture
def trained(x64, config, randomise):
    """A function of a mesh's name: params and metrics after three steps in float64."""
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    rows = np.random.default_rng(0).integers(0, 20, (3, B, T + 1), np.int32)

    def train(mesh_name, parts=1):
        axes, optimizer, state = _state(config, jax.tree.map(jnp.asarray, params))
        mesh = _mesh(mesh_name)
        shardings = sharding.state_sharding(mesh, axes, state)
        graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
        compute = Compute(dtype=jnp.dtype(jnp.float64), loss_chunks=2)
        step = jax.jit(
            functools.partial(
                train_step, graph=graph, optimizer=optimizer, compute=compute, parts=parts
            ),
            out_shardings=(shardings, None),
        )
        state, metrics = jax.device_put(state, shardings), []
        for batch in rows:
            batch = jax.device_put(batch, sharding.batch_sharding(mesh))
            state, values = step(state, batch)
            metrics.append([float(values["loss"]), float(values["grad_norm"])])
        return jax.device_get(state), np.array(metrics), params

    return train


@pytest.mark.slow
def test_eight_devices_train_as_one(trained):
    state, metrics, before = trained("one")
    assert int(state["step"]) == 3
    for x, y in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(before), strict=True):
        assert np.all(x != y)  # every weight of the model moved
    for name, parts in (("fsdp8", 1), ("data2_fsdp4", 1), ("one", 4)):
        other, other_metrics, _ = trained(name, parts)
        np.testing.assert_allclose(other_metrics, metrics, rtol=1e-10)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, other, state)


@pytest.mark.parametrize(
    "data, fsdp, message",
    [
        (3, 0, "data = 3 x fsdp = 2 is 6.*8 devices"),
        (2, 3, "data = 2 x fsdp = 3 is 6.*8 devices"),
        (16, 0, "data = 16 x fsdp = 1 is 16.*8 devices"),
    ],
)
def test_meshes_that_do_not_multiply(data, fsdp, message):
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices())


def test_mesh_values():
    assert dict(sharding.make_mesh(MeshConfig(data=2), jax.devices()).shape) == dict(data=2, fsdp=4)
    with pytest.raises(UserError, match="config.mesh.data = 0: must be at least 1"):
        MeshConfig(data=0)
    with pytest.raises(UserError, match="config.mesh.fsdp = -1: must be at least 0"):
        MeshConfig(fsdp=-1)
