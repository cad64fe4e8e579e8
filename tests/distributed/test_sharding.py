"""One device and eight: the same numbers, an eighth of the bytes each."""

import functools
import math
import re

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from kvjax import experiment as experiment_lib
from kvjax.distributed import sharding
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import checkout
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.optim import OptimizerConfig
from kvjax.optim import make_optimizer
from kvjax.training import memory_estimate
from kvjax.training.program import Program
from kvjax.training.program import train_step
from tests import quick
from tests import runs
from tests.conftest import MECHANISMS

CONFIGS = sorted(checkout.CONFIGS.rglob("*.py"))
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
SEVERAL = tuple(MESHES)[1:]
STEPS = 8  # queries and keys first move in the fourth
# Head dims that eight devices divide, where weights are split over them.
DIMS = {
    "lrkv_wide_keys": dict(key_dim=16, value_dim=8),
    "lrkv_shared_rope": dict(key_dim=16, value_dim=8),
    "mla": dict(value_dim=8),
    "lrkv_kv_tied": {},
}


def _mesh(name):
    config = MeshConfig(**MESHES[name])
    size = math.prod((config.data, config.fsdp, config.sequence, config.tensor))
    return sharding.make_mesh(config, jax.devices()[:size])


def _model(mechanism):
    block = BlockConfig(num_layers=LAYERS, d_model=D, mlp_dim=32, norm_gain=True)
    return TransformerConfig(block=block, mechanisms=(mechanism,) * LAYERS, vocab_size=V)


@pytest.fixture
def config(make_mechanism):
    return _model(make_mechanism("lrkv", qk_norm="rms_gain"))


class Step:
    """A jitted training step on a mesh, and a state to start it from."""

    def __init__(self, config, params, mesh, dtype, parts=1, **compute):
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
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
        key = jax.random.key_data(jax.random.key(0))
        state = dict(params=params, optimizer=optimizer.init(params), step=jnp.int32(0), key=key)
        shardings = sharding.state_shardings(mesh, shapes, axes, state)
        graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
        compute = dict(loss_chunks=2) | compute
        compute = Compute(dtype=jnp.dtype(dtype), mesh=mesh if several else None, **compute)
        options = dict(graph=graph, optimizer=optimizer, compute=compute, parts=parts)
        step = functools.partial(train_step, **options)
        self.jitted = jax.jit(step, out_shardings=(shardings, None))
        self.state = jax.device_put(state, shardings)
        self.rows = sharding.batch_sharding(mesh)

    def __call__(self, rows):
        self.state, metrics = self.jitted(self.state, jax.device_put(rows, self.rows))
        return [float(metrics["loss"]), float(metrics["grad_norm"])]

    def compiled_text(self, rows):
        return self.jitted.lower(self.state, jax.device_put(rows, self.rows)).compile().as_text()


def _rows(steps):
    return np.random.default_rng(0).integers(0, V, (steps, B, T + 1), np.int32)


def _train(config, params, mesh_name, dtype, *, steps=STEPS, **options):
    step = Step(config, params, _mesh(mesh_name), dtype, **options)
    metrics = np.array([step(rows) for rows in _rows(steps)])
    return jax.device_get(step.state), metrics


# -- the same numbers ------------------------------------------------------------------------------


def _meshes(name, i):
    """LRKV on every mesh, the others on one each in turn."""
    return SEVERAL if name == "lrkv" else (SEVERAL[i % len(SEVERAL)],)


@pytest.mark.slow
@pytest.mark.parametrize("name, meshes", [(n, _meshes(n, i)) for i, n in enumerate(MECHANISMS)])
def test_eight_devices_train_as_one_in_float64(x64, make_mechanism, randomise, name, meshes):
    config = _model(make_mechanism(name, qk_norm="rms_gain", **DIMS.get(name, {})))
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    one, one_metrics = _train(config, params, "one", jnp.float64)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(one["params"]), strict=True):
        assert np.all(before != after)  # every weight moved
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    for mesh_name in meshes:
        other, metrics = _train(config, params, mesh_name, jnp.float64)
        np.testing.assert_allclose(metrics, one_metrics, rtol=1e-10, err_msg=mesh_name)
        jax.tree.map(close, other["params"], one["params"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, meshes", [(n, _meshes(n, i)) for i, n in enumerate(("lrkv", *quick.READERS))]
)
def test_eight_devices_train_as_one_in_float32(make_mechanism, randomise, name, meshes):
    config = _model(make_mechanism(name, **DIMS.get(name, {})))
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    one, one_metrics = _train(config, params, "one", jnp.float32)
    for mesh_name in dict.fromkeys((meshes[0], *meshes[-2:])):
        other, metrics = _train(config, params, mesh_name, jnp.float32)
        np.testing.assert_allclose(metrics[:, 0], one_metrics[:, 0], rtol=1e-5, err_msg=mesh_name)
        # Muon amplifies rounding: a direction the gradient hardly has is made as long as any.
        for x, y in zip(*map(jax.tree.leaves, (other["params"], one["params"])), strict=True):
            assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y), mesh_name


@pytest.mark.parametrize("mesh_name", quick.only(["fsdp8"], ["one", "fsdp8", "fsdp4_sequence2"]))
def test_parts_of_a_batch_add_up(x64, config, randomise, mesh_name):
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    one, _ = _train(config, params, "one", jnp.float64, steps=3)
    parts = 1 if mesh_name == "fsdp8" else 4 if mesh_name == "one" else 2
    options = dict(remat="full", parts=parts)
    other, _ = _train(config, params, mesh_name, jnp.float64, steps=3, **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, other["params"], one["params"])


def test_initial_parameters_do_not_depend_on_the_mesh(config):
    init = lambda key: nnx.to_pure_dict(nnx.state(Transformer(config, key)))
    weights = parameters.abstract(config)
    results = []
    for name in ("one", "fsdp8", "fsdp4_tensor2"):
        shardings = sharding.parameter_shardings(_mesh(name), *weights)
        params = jax.jit(init, out_shardings=shardings)(jax.random.key(3))
        results.append(jax.device_get(params))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    assert np.ptp(results[0]["embedding"]) > 1


# -- where it lies ---------------------------------------------------------------------------------

# Axes of the stored array (layers first) by the weight's name, written down by hand.
EXPECTED = dict(
    embedding=P(None, ("fsdp", "tensor")),
    head=P("fsdp", "tensor"),
    query=P(None, "fsdp", "tensor", None),
    base_key=P(None, "fsdp", None, None),
    base_value=P(None, "fsdp", None, None),
    latent_key=P(None, "fsdp", "tensor", None),
    latent_value=P(None, "fsdp", "tensor", None),
    expand_key=P(None, "tensor", None, "fsdp"),
    expand_value=P(None, "tensor", None, "fsdp"),
    out=P(None, "tensor", None, "fsdp"),
    up=P(None, "fsdp", "tensor"),
    down=P(None, "tensor", "fsdp"),
)


@pytest.mark.parametrize(
    "mesh_name", quick.only(["fsdp4_tensor2"], ["fsdp8", "data2_fsdp4", "fsdp4_tensor2"])
)
def test_state_lies_as_its_parameters_and_takes_its_share_of_bytes(config, randomise, mesh_name):
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    mesh = _mesh(mesh_name)
    state = Step(config, params, mesh, jnp.float32).state
    split = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")[2]
        spec = EXPECTED.get(name, P()) if x.ndim else P()
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), x.ndim), path
        names = [n for axes in spec for n in ((axes,) if isinstance(axes, str) else axes or ())]
        ways = math.prod(mesh.shape[n] for n in names)
        assert len(x.addressable_shards) == 8
        assert all(s.data.nbytes * ways == x.nbytes for s in x.addressable_shards)
        split += ways > 1
    # 10 matrices of the blocks have one moment each, embedding and head two.
    assert split == 10 * 2 + 2 * 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_large_parameter_of_every_config_is_split(path):
    model = experiment_lib.resolve(command_line.load_config(path)).model
    shapes, axes = parameters.abstract(model)
    mesh = _mesh("fsdp8")
    shardings = sharding.parameter_shardings(mesh, shapes, axes)
    count = 0
    for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        ways = math.prod(x.shape) // math.prod(s.shard_shape(x.shape))
        assert ways == 8 or math.prod(x.shape) * 4 < 1 << 20
        count += ways == 8
    assert count >= 6


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["fsdp8", "fsdp4_tensor2"])
def test_a_real_models_devices_hold_an_eighth_each(mesh_name):
    """But for LRKV's one base, which `tensor` does not split."""
    path = next(p for p in CONFIGS if p.stem == "lrkv_128m")
    experiment = experiment_lib.resolve(command_line.load_config(path))
    mesh = _mesh(mesh_name)
    compute = experiment.compute.resolve("cpu", experiment.model.block.num_layers)
    state = Program(experiment, compute, mesh).init(jax.random.key(0))
    on_first = 0
    for leaf_path, x in jax.tree_util.tree_leaves_with_path(state):
        shard = x.addressable_shards[0]
        ways = 4 if "base_" in jax.tree_util.keystr(leaf_path) and mesh.shape["tensor"] > 1 else 8
        assert shard.data.nbytes * ways == x.nbytes or x.nbytes < 1 << 20, leaf_path
        on_first += shard.data.nbytes
    need = memory_estimate.state(experiment.model, 8)
    bases = 2 * 2 * 4 * 12 * 768 * 128  # of keys and values, each with its momentum
    more = bases // 8 if mesh_name == "fsdp4_tensor2" else 0
    assert on_first == pytest.approx(need.parameters + need.optimizer + more, rel=1e-3)


def test_batches_are_split_over_data_and_fsdp():
    for name in ("fsdp8", "data2_fsdp4"):
        rows = jax.device_put(np.zeros((16, 5)), sharding.batch_sharding(_mesh(name)))
        assert {s.data.shape for s in rows.addressable_shards} == {(2, 5)}
        starts = {s.index[0].start or 0 for s in rows.addressable_shards}
        assert starts == set(range(0, 16, 2))
    rows = jax.device_put(np.zeros((16, 5)), sharding.batch_sharding(_mesh("fsdp4_sequence2")))
    assert {s.data.shape for s in rows.addressable_shards} == {(4, 5)}


# -- what is computed and what travels -------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(make_mechanism, randomise):
    """A function of a mesh: LRKV's parameters, and the text of a compiled step of full remat."""

    @functools.cache
    def compiled(mesh_name):
        config = _model(make_mechanism("lrkv", qk_norm="rms_gain"))
        _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
        step = Step(config, params, _mesh(mesh_name), jnp.float32, remat="full")
        return params, step.compiled_text(_rows(1)[0])

    return compiled


@pytest.mark.parametrize("mesh_name", quick.only(["data2_fsdp4"], ["fsdp8", "data2_fsdp4"]))
def test_a_device_computes_its_own_rows_only(mesh_name):
    """In the compiled step, no array of three axes or more holds all rows, 32, or 32 x T tokens at
    full width (all tokens at an eighth of it are what the embedding's gradient adds up)."""
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
    assert not [s for s in shapes if s[:2] in {(32, 24), (32, 12)}]
    assert not [s for s in shapes if s[0] == 32 * 24 and math.prod(s) >= 32 * 24 * 32]


def test_weights_are_what_is_gathered_in_the_layers(compiled):
    """What travels over `fsdp` in the layers is weights: twice each, for both passes."""
    params, text = compiled("fsdp8")
    found = _collectives(text, "while")
    matrices = [x for x in jax.tree.leaves(params["segments"]) if x.ndim > 2]
    gathered = sorted(size for kind, size in found if kind == "all-gather")
    assert gathered == sorted(x.size // LAYERS for x in matrices for _ in range(2))


def _collectives(text, scope):
    """(kind, elements of the result) of every collective whose name has the scope in it."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(-start)?\(", line)
        if match and f"/{scope}/" in line.partition("op_name=")[2]:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [math.prod(int(n) for n in s.split(",") if n) for s in shapes]
            found.append((match[2], sum(sizes)))
    return found


def test_muon_sends_every_matrix_twice_and_gathers_nothing(compiled):
    """What a device sends is its part of the stack, padded from 3 layers to 8."""
    params, text = compiled("fsdp8")
    found = _collectives(text, "muon")
    matrices = [x for x in jax.tree.leaves(params["segments"]) if x.ndim > 2]
    assert len(matrices) == 10
    assert [kind for kind, _ in found] == ["all-to-all"] * 20
    assert sum(size for _, size in found) == 2 * sum(x.size // LAYERS * 8 // 8 for x in matrices)


@pytest.mark.parametrize(
    "mesh_name", quick.only(["fsdp4_sequence2"], ["data2_fsdp4", "fsdp4_sequence2"])
)
def test_muon_gathers_results_where_weights_are_copied(compiled, mesh_name):
    """Each of two copies does half of the layers (4 of 8, padded) and hears of the other half."""
    params, text = compiled(mesh_name)
    found = _collectives(text, "muon")
    each = sum(x.size // LAYERS for x in jax.tree.leaves(params["segments"]) if x.ndim > 2)
    sizes = {kind: sum(size for k, size in found if k == kind) for kind, _ in found}
    assert sizes == {"all-to-all": 2 * 4 * each // 4, "all-gather": 8 * each // 4}
    assert [kind for kind, _ in found].count("all-to-all") == 20


def test_layers_are_dealt_whole(x64):
    """`by_layers` applies a function of whole matrices, each on one device."""
    from kvjax.optim import by_layers

    seen = []

    def function(x):
        seen.append(x.shape)
        return x / (1 + jnp.linalg.norm(x, axis=(1, 2), keepdims=True))

    w = np.random.default_rng(0).normal(size=(5, 16, 8))
    for name in ("fsdp8", "data2_fsdp4", "fsdp4_tensor2", "data2_sequence2_tensor2"):
        where = jax.NamedSharding(_mesh(name), P(None, "fsdp", "tensor"))
        got = jax.jit(by_layers(function, where))(jax.device_put(w, where))
        assert got.sharding.is_equivalent_to(where, 3)
        np.testing.assert_allclose(got, function(w), rtol=1e-12)
        assert seen[-2:] == [(1, 16, 8), (5, 16, 8)]


def test_context_parallelism_sends_latents_not_keys(compiled):
    """LRKV's per token: two bases of H and 2·K·R, where keys and values are 2·N·H.

    For the forward pass, and once more for the backward pass, which keeps none of it.
    """
    _, text = compiled("fsdp4_sequence2")
    gathered = [size for kind, size in _collectives(text, "latents") if kind == "all-gather"]
    tokens, K, H, R = (B // 4) * T, 4, 8, 3
    assert sum(gathered) == 2 * tokens * 2 * (H + K * R) < 2 * tokens * 2 * K * H
    assert not _collectives(compiled("fsdp8")[1], "latents")


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(data=3), "data = 3 x fsdp = 2 x .* is 6, and there are 8 devices; .*1, 2, 4, 8"),
        (dict(data=2, fsdp=3), r"is 6, .*8 devices; with config.mesh.fsdp = 4 \(or 0\)"),
        (dict(data=16), "data = 16 x fsdp = 1 x .* is 16.*8 devices"),
        (dict(sequence=2, tensor=3), "sequence = 2 x tensor = 3 is 6.*8 devices"),
    ],
)
def test_meshes_that_do_not_multiply(sizes, message):
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(MeshConfig(**sizes), jax.devices())


def test_mesh_values():
    mesh = sharding.make_mesh(MeshConfig(data=2), jax.devices())
    assert dict(mesh.shape) == dict(data=2, fsdp=4, sequence=1, tensor=1)
    with pytest.raises(UserError, match="config.mesh.data = 0: must be at least 1"):
        MeshConfig(data=0)
    with pytest.raises(UserError, match="config.mesh.fsdp = -1: must be at least 0"):
        MeshConfig(fsdp=-1)


@pytest.mark.parametrize(
    "name, mesh, message",
    [
        ("mha_2p5b", dict(tensor=4), r"tensor = 4 does not divide the 18 .*1, 2, 3, 6, 9, 18"),
        ("lrkv_6p3b", dict(tensor=2), r"tensor = 2 does not divide the 25 .*in 1, 5, 25"),
        ("gqa_2p5b", dict(tensor=4), "tensor = 4 does not divide the"),
    ],
)
def test_heads_that_do_not_divide(name, mesh, message):
    path = next(p for p in CONFIGS if p.stem == name)
    model = experiment_lib.resolve(command_line.load_config(path)).model
    mesh = sharding.make_mesh(MeshConfig(**mesh), jax.devices())
    with pytest.raises(UserError, match=message):
        sharding.parameter_shardings(mesh, *parameters.abstract(model))


# Every form of weight there is or will be, with its layers in front where it has them.
SPLIT = {
    "V D": P(None, ("fsdp", "tensor")),
    "T D": P(None, ("fsdp", "tensor")),
    "D -> V": P("fsdp", "tensor"),
    "D -> N H": P("fsdp", "tensor", None),
    "D -> K R": P("fsdp", "tensor", None),
    "D -> C": P("fsdp", None),
    "K: R -> H": P("tensor", None, "fsdp"),
    "C -> N H": P(None, "tensor", "fsdp"),
    "J: C -> N H": P("tensor", None, None, "fsdp"),
    "N H -> D": P("tensor", None, "fsdp"),
    "D -> M": P("fsdp", "tensor"),
    "M -> D": P("tensor", "fsdp"),
    "C -> M": P("fsdp", "tensor"),
    "D -> R N": P("fsdp", None, "tensor"),
    "N H": P("tensor", None),
    "M": P("tensor"),
    "D": P(None),
    "C": P(None),
}


@pytest.mark.parametrize("axes", SPLIT)
def test_axes_say_how_a_weight_is_split(axes):
    shape = (8,) * len(SPLIT[axes])
    assert sharding.spec(axes, shape) == SPLIT[axes]
    assert sharding.spec(axes, (3, *shape)) == P(None, *SPLIT[axes])


def test_what_is_never_split():
    assert sharding.spec("D -> J H", (16, 1, 8)) == P("fsdp", None, None)
    assert sharding.spec("J: C -> N H", (1, 8, 8, 8)) == P(None, None, "tensor", "fsdp")
    with pytest.raises(ValueError, match=r"'D -> N H' name more than the 2 axes of \(16, 8\)"):
        sharding.spec("D -> N H", (16, 8))
