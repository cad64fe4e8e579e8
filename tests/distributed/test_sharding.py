"""Sharding over eight devices: placement, computation and communication."""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.distributed import sharding
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.transformer import Compute, Transformer
from kvjax.training.program import Program
from tests import quick, runs
from tests.distributed import small_step
from tests.distributed.small_step import LAYERS, B, D, Step, T

CONFIGS = command_line.config_files()

# -- placement -------------------------------------------------------------------------------------

# PartitionSpec of the stored array (layers first) by the weight's name, written by hand.
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
    mesh = small_step.mesh(mesh_name)
    state = Step(config, params, mesh, jnp.float32).state
    split = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")[2]
        spec = EXPECTED.get(name, P()) if x.ndim else P()
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), x.ndim), path
        names = [n for axes in spec for n in ((axes,) if isinstance(axes, str) else axes or ())]
        num_shards = math.prod(mesh.shape[n] for n in names)
        assert len(x.addressable_shards) == 8
        assert all(s.data.nbytes * num_shards == x.nbytes for s in x.addressable_shards)
        split += num_shards > 1
    # 10 matrices of the blocks have one moment each, embedding and head two.
    assert split == 10 * 2 + 2 * 3


@pytest.mark.parametrize("path", quick.every(6, CONFIGS), ids=command_line.config_label)
def test_every_large_parameter_of_every_config_is_split(path):
    model = config_lib.resolve(command_line.load_config(path)).model
    shapes, axes = parameters.abstract(model)
    mesh = small_step.mesh("fsdp8")
    shardings = sharding.parameter_shardings(mesh, shapes, axes)
    count = 0
    for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        num_shards = math.prod(x.shape) // math.prod(s.shard_shape(x.shape))
        assert num_shards == 8 or math.prod(x.shape) * 4 < 1 << 20
        count += num_shards == 8
    assert count >= 6


def test_batches_are_split_over_data_and_fsdp():
    for name, rows in (("fsdp8", 2), ("data2_fsdp4", 2), ("fsdp4_sequence2", 4)):
        batch = jax.device_put(np.zeros((16, 5)), sharding.batch_sharding(small_step.mesh(name)))
        assert {s.data.shape for s in batch.addressable_shards} == {(rows, 5)}
        starts = {s.index[0].start or 0 for s in batch.addressable_shards}
        assert starts == set(range(0, 16, rows))


# -- computation and communication -----------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(make_mechanism, randomise):
    """Returns a function from a mesh's name to LRKV's parameters and the compiled step's text."""

    @functools.cache
    def compiled(mesh_name):
        config = small_step.model(make_mechanism("lrkv", qk_norm="rms_gain"))
        _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
        step = Step(config, params, small_step.mesh(mesh_name), jnp.float32, remat="full")
        return params, step.compiled_text(small_step.rows(1)[0])

    return compiled


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["fsdp8", "data2_fsdp4"])
def test_a_device_computes_its_own_rows_only(mesh_name):
    """No array of the compiled step has all 32 rows and T, or 32 x T tokens at full width.

    (The embedding's gradient sums over all tokens, at an eighth of the width.)
    """
    config = runs.small_config("unused.txt", "", batch_size=32)
    config.data.sequence_length = 24
    experiment = config_lib.resolve(config)
    compute = Compute(remat="full", loss_chunks=2)
    program = Program(experiment, compute, small_step.mesh(mesh_name))
    rows = jax.ShapeDtypeStruct(
        (32, 25), jnp.int32, sharding=sharding.batch_sharding(small_step.mesh(mesh_name))
    )
    text = program.train_step.lower(program.abstract_state, rows).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert any(shape[0] == 4 for shape in shapes)
    # Widths of this model are 16, 32, 64 and 257; 32 is also D, so rows lead and T follows.
    assert not [s for s in shapes if s[:2] in {(32, 24), (32, 12)}]
    assert not [s for s in shapes if s[0] == 32 * 24 and math.prod(s) >= 32 * 24 * 32]


@pytest.mark.parametrize("mesh_name", ["fsdp8", "data2_fsdp4", "fsdp4_tensor2"])
def test_the_gradient_of_a_gathered_weight_is_scattered(mesh_name):
    """The gradient is sharded without a hint from optimizer state or output shardings."""
    mesh = small_step.mesh(mesh_name)

    def put(x, *split):
        return jax.device_put(x, jax.NamedSharding(mesh, P(*split)))

    rng = np.random.default_rng(0)
    w_DNH = put(rng.normal(size=(D, 8, 4)).astype(np.float32), "fsdp", "tensor")
    x_BD = put(rng.normal(size=(B, D)).astype(np.float32), sharding.BATCH)

    def loss(w_DNH, x_BD):
        w_DNH = sharding.gather(w_DNH, "D -> N H", mesh)
        return jnp.sum(jnp.einsum("BD,DNH->BNH", x_BD, w_DNH) ** 2)

    gradient = jax.jit(jax.grad(loss))(w_DNH, x_BD)
    assert gradient.sharding.is_equivalent_to(w_DNH.sharding, 3), gradient.sharding


@pytest.mark.slow
def test_layers_gather_only_weights(compiled):
    """Each weight is gathered over `fsdp` twice: in the forward and in the backward pass."""
    params, text = compiled("fsdp8")
    collectives = _collectives(text, "while")
    matrices = [x for x in jax.tree.leaves(params["segments"]) if x.ndim > 2]
    gathered = sorted(size for kind, size in collectives if kind == "all-gather")
    assert gathered == sorted(x.size // LAYERS for x in matrices for _ in range(2))


def _collectives(text, scope):
    """Returns (kind, elements of the result) of each collective whose name contains the scope."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    collectives = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(-start)?\(", line)
        if match and f"/{scope}/" in line.partition("op_name=")[2]:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [math.prod(int(n) for n in s.split(",") if n) for s in shapes]
            collectives.append((match[2], sum(sizes)))
    return collectives


@pytest.mark.slow
@pytest.mark.whole
def test_muon_sends_every_matrix_twice_and_gathers_nothing(compiled):
    """A device sends its shard of the stack, padded from 3 layers to 8."""
    params, text = compiled("fsdp8")
    sent = _collectives(text, "muon")
    matrices = [x for x in jax.tree.leaves(params["segments"]) if x.ndim > 2]
    assert len(matrices) == 10
    assert [kind for kind, _ in sent] == ["all-to-all"] * 20
    assert sum(size for _, size in sent) == 2 * sum(x.size // LAYERS * 8 // 8 for x in matrices)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["data2_fsdp4", "fsdp4_sequence2"])
def test_muon_gathers_results_where_weights_are_copied(compiled, mesh_name):
    """Each of two replicas computes half of the layers (4 of 8, padded) and gathers the rest."""
    params, text = compiled(mesh_name)
    collectives = _collectives(text, "muon")
    elements = sum(x.size // LAYERS for x in jax.tree.leaves(params["segments"]) if x.ndim > 2)
    sizes = {kind: sum(size for k, size in collectives if k == kind) for kind, _ in collectives}
    assert sizes == {"all-to-all": 2 * 4 * elements // 4, "all-gather": 8 * elements // 4}
    assert [kind for kind, _ in collectives].count("all-to-all") == 20


def test_distribute_layers(x64):
    """`distribute_layers` applies a function of whole matrices, each on one device."""
    from kvjax.optim import distribute_layers

    shapes = []

    def function(x):
        shapes.append(x.shape)
        return x / (1 + jnp.linalg.norm(x, axis=(1, 2), keepdims=True))

    w = np.random.default_rng(0).normal(size=(5, 16, 8))
    for name in ("fsdp8", "data2_fsdp4", "fsdp4_tensor2", "data2_sequence2_tensor2"):
        sharded = jax.NamedSharding(small_step.mesh(name), P(None, "fsdp", "tensor"))
        result = jax.jit(distribute_layers(function, sharded))(jax.device_put(w, sharded))
        assert result.sharding.is_equivalent_to(sharded, 3)
        np.testing.assert_allclose(result, function(w), rtol=1e-12)
        assert shapes[-2:] == [(1, 16, 8), (5, 16, 8)]


@pytest.mark.slow
def test_context_parallelism_sends_latents_not_keys(compiled):
    """Per token, LRKV sends two bases of H and 2·K·R; keys and values would be 2·K·H.

    It sends them in the forward pass, and again in the backward pass, which saved none of them.
    """
    _, text = compiled("fsdp4_sequence2")
    gathered = [size for kind, size in _collectives(text, "latents") if kind == "all-gather"]
    tokens, K, H, R = (B // 4) * T, 4, 8, 3
    assert sum(gathered) == 2 * tokens * 2 * (H + K * R) < 2 * tokens * 2 * K * H
    assert not _collectives(compiled("fsdp8")[1], "latents")


# -- refused meshes --------------------------------------------------------------------------------


def test_meshes_that_do_not_multiply():
    divide = "data x sequence x tensor must be one of its divisors 1, 2, 4, 8"
    for sizes, product in (
        ((3, 0, 1, 1), "data = 3 x fsdp = 2 x sequence = 1 x tensor = 1 is 6"),
        ((2, 3, 1, 1), "data = 2 x fsdp = 3 x sequence = 1 x tensor = 1 is 6"),
        ((16, 0, 1, 1), "data = 16 x fsdp = 1 x sequence = 1 x tensor = 1 is 16"),
        ((1, 0, 2, 3), "data = 1 x fsdp = 1 x sequence = 2 x tensor = 3 is 6"),
    ):
        config = MeshConfig(**dict(zip(sharding.AXES, sizes, strict=True)))
        with pytest.raises(UserError) as error:
            sharding.make_mesh(config, jax.devices())
        advice = "set config.mesh.fsdp = 4 (or 0)" if config.fsdp else divide
        assert str(error.value) == f"config.mesh: {product}, and there are 8 devices; {advice}"


def test_mesh_values():
    mesh = sharding.make_mesh(MeshConfig(data=2), jax.devices())
    assert dict(mesh.shape) == dict(data=2, fsdp=4, sequence=1, tensor=1)
    assert sharding.batch_shards(mesh) == 8
    for key in sharding.AXES:
        minimum = 0 if key == "fsdp" else 1
        for value in (minimum, 1 << 20):
            assert getattr(MeshConfig(**{key: value}), key) == value
        for value in (minimum - 1, 1 + (1 << 20)):
            text = f"config.mesh.{key} = {value}: must be at least {minimum} and at most 1,048,576"
            with pytest.raises(UserError, match=text):
                MeshConfig(**{key: value})


def test_heads_that_do_not_divide():
    path = next(p for p in CONFIGS if p.stem == "mha_2p5b")
    weights = parameters.abstract(config_lib.resolve(command_line.load_config(path)).model)
    mesh = sharding.make_mesh(MeshConfig(tensor=4), jax.devices())
    message = r"tensor = 4 does not divide the 18 of .*_key \[36, 2304, 18, 128\].* 1, 2, 3, 6, 9"
    with pytest.raises(UserError, match=message):
        sharding.parameter_shardings(mesh, *weights)
    assert not sharding.divides(mesh.shape, *weights)
    assert sharding.divides(mesh.shape | dict(fsdp=2, tensor=1), *weights)


# PartitionSpec by axes, for all forms of weights.
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


def test_axes_say_how_a_weight_is_split():
    for axes, split in SPLIT.items():
        shape = (2, 3, 4, 5)[: len(split)]
        assert sharding.spec(axes, shape) == split, axes
        assert sharding.spec(axes, shape[::-1]) == split, axes
        assert sharding.spec(axes, (7, *shape)) == P(None, *split), axes


def test_axes_of_length_1_are_replicated():
    assert sharding.spec("D -> J H", (16, 1, 8)) == P("fsdp", None, None)
    assert sharding.spec("J: C -> N H", (1, 8, 8, 8)) == P(None, None, "tensor", "fsdp")
