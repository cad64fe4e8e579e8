"""The roofline against products counted in the traced step, and against figures by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from kvjax import recipes
from kvjax.aot import roofline
from kvjax.config import Experiment, resolve
from kvjax.costs import formulas
from kvjax.distributed import sharding
from kvjax.hardware.datasheets import Device
from kvjax.optim import newton_schulz
from kvjax.training.program import Program
from tests import quick

ONE = dict(data=1, fsdp=1, sequence=1, tensor=1)


def make(attention=None, *, remat="none", parts=1, **model) -> Experiment:
    config = recipes.pretrain("x", scale="tiny", attention=attention or recipes.mha(4, head_dim=32))
    config.model.update(model)
    config.compute.update(remat=remat, dtype="float32", query_chunk=0, unroll="off")
    config.train.update(grad_accumulation=parts)
    return resolve(config)


def products(jaxpr) -> int:
    """FLOPs of every matrix product of a jaxpr, loops by their length."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = math.prod(left[i] for i in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                total += times * products(getattr(value, "jaxpr", value))
    return total


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def traced(experiment: Experiment) -> int:
    mesh = sharding.make_mesh(experiment.mesh, jax.devices()[:1])
    program = Program(experiment, experiment.compute.resolve("cpu", 4), mesh)
    shape = (experiment.train.batch_size, experiment.data.sequence_length + 1)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32)
    return products(program.train_step.trace(program.abstract_state, rows).jaxpr.jaxpr)


@pytest.mark.parametrize("remat", quick.only(["attention", "full"], ["none", "attention", "full"]))
@pytest.mark.parametrize("parts", quick.only([4], [1, 4]))
def test_flops_are_those_of_the_traced_step(remat, parts):
    """Attention without a kernel. The embedding's gradient is no product."""
    experiment = make(remat=remat, parts=parts)
    flops = roofline.step_flops(experiment, causal_kernel=False)
    assert flops.needed == flops.model
    assert (flops.rematerialised == 0) == (remat == "none")
    assert flops.total == traced(experiment)


RIVALS = [
    recipes.mfa(4, query_rank=48, head_dim=32),
    recipes.mfa_kr(4, query_rank=48, head_dim=32),
    # Values as wide as keys, to which XLA's softmax attention pads them.
    recipes.gla(4, latents=2, latent=24, rope_dim=16, head_dim=32) | dict(value_dim=48),
    recipes.mlra(4, branches=2, latent=16, rope_dim=16, head_dim=32) | dict(value_dim=48),
    recipes.gta(4, kv_heads=2, head_dim=32),
    recipes.shared_kv(4, kv_heads=2, head_dim=32, rope_dim=16),
    recipes.tpa(4, key_rank=2, value_rank=3, head_dim=32),
]


@pytest.mark.parametrize(
    "attention, remat",
    quick.only(
        [(RIVALS[3], "dots")],
        [
            (recipes.lrkv(4, rank=16, head_dim=32), "full"),
            (recipes.gqa(4, kv_heads=2, head_dim=32), "full"),
            *((attention, remat) for attention in RIVALS for remat in ("full", "dots")),
        ],
    ),
)
def test_flops_of_other_mechanisms(attention, remat):
    experiment = make(attention, remat=remat, activation="swiglu")
    assert roofline.step_flops(experiment, causal_kernel=False).total == traced(experiment)


@pytest.mark.parametrize(
    "attention, expansions",
    [
        (recipes.mha(4, head_dim=32), 0),
        pytest.param(recipes.gqa(4, kv_heads=2, head_dim=32), 0, marks=pytest.mark.slow),
        (recipes.lrkv(4, rank=16, head_dim=32), 4 * 16 * (32 + 32)),  # K·R·(H + Hv)
    ],
)
def test_keeping_products_computes_those_of_each_head_again(attention, expansions):
    """Products with a weight are saved; with LRKV's B, batched over heads, they are not."""
    experiment = make(attention, remat="dots")
    flops = roofline.step_flops(experiment, causal_kernel=False)
    assert flops.total == traced(experiment)
    kernel = roofline.step_flops(experiment, causal_kernel=True)
    assert kernel.rematerialised == 32 * 256 * 4 * 2 * expansions  # rows, T, layers


def test_a_causal_kernel_computes_half_of_attention_and_some_again():
    experiment = make(remat="full")
    whole = roofline.step_flops(experiment, causal_kernel=False)
    half = roofline.step_flops(experiment, causal_kernel=True)
    products = 32 * 256 * 4 * 256 * 4 * 32 * 2  # rows, T, layers, keys, N, H: one product
    assert whole.model == half.model
    assert whole.needed - half.needed == 6 * products - 7 * products // 2
    assert whole.rematerialised - half.rematerialised == products
    kept = roofline.step_flops(make(remat="attention"), causal_kernel=True)
    assert half.rematerialised - kept.rematerialised == products


def test_a_causal_kernel_skips_keys_before_a_window():
    """Windows of 64 tokens and longer than a row (T = 256), and none."""
    for window, keys in ((64, 64 - 64**2 / 512), (300, 128), (0, 128)):
        experiment = make(window=window)
        flops = [roofline.step_flops(experiment, causal_kernel=k).needed for k in (False, True)]
        products = 32 * 256 * 4 * 4 * 32 * 2  # rows, T, layers, N, H: one key's product
        assert flops[0] - flops[1] == products * (6 * 256 - 7 * keys)


@pytest.mark.parametrize("orthogonalize, count", [("joint", 1), ("per_head", 4)])
def test_newton_schulz(orthogonalize, count):
    """Per layer four matrices of D x N·H (128 x 128, or per head 128 x 32), two of 128 x 512."""
    experiment = make()
    optimizer = dataclasses.replace(experiment.optimizer, orthogonalize=orthogonalize)

    def cost(m, n):
        return products(jax.make_jaxpr(lambda x: newton_schulz(x, 5))(jnp.zeros((1, m, n))).jaxpr)

    expected = 4 * (4 * count * cost(128, 128 // count) + 2 * cost(128, 512))
    assert roofline.newton_schulz_flops(experiment.model, optimizer) == expected


def test_hbm_bytes_by_hand():
    """P = 1,310,720, of which 786,432 for Muon and 1,048,576 without the embedding."""
    moved = 2 * 4 * (1_310_720 + (786_432 + 2 * 524_288) + 1_310_720)
    read = 4 * 1_048_576
    inputs, products = 4 * 128, 4 * (4 * 4 * 32 + 512)
    tokens = 32 * 256

    def by(mesh=(), kernel=True, **keys):
        return roofline.hbm_bytes(make(**keys), ONE | dict(mesh), causal_kernel=kernel)

    assert by() == moved + 2 * read + 2 * 4 * tokens * (inputs + products)
    assert by(remat="full") == moved + 3 * read + 2 * 4 * tokens * inputs
    kept = inputs + 4 * 4 * 32
    assert by(remat="attention") == moved + 3 * read + 2 * 4 * tokens * kept
    assert by(remat="attention", kernel=False) == by(remat="full")
    mesh = dict(data=2, fsdp=4, tensor=2)
    expected = moved / 8 + 3 * 8 * read / 2 + 2 * 4 * tokens / 16 * inputs
    assert by(mesh, remat="full", parts=8) == expected


def test_activations_of_an_lrkv_by_hand():
    """With "dots" bases, latents, attention and its output are saved; with "none" expanded keys and
    values. GQA has one key per KV head."""

    def per_token(remat, attention, kernel=True):
        return (
            roofline.hbm_bytes(make(attention, remat=remat), ONE, causal_kernel=kernel)
            - roofline.hbm_bytes(make(attention, remat=other[remat]), ONE, causal_kernel=kernel)
        ) / (2 * 4 * 32 * 256 * 4)  # there and back, float32, tokens, layers

    other = {"dots": "none", "none": "dots"}
    lrkv, gqa = recipes.lrkv(4, rank=16, head_dim=32), recipes.gqa(4, kv_heads=1, head_dim=32)
    dots = 128 + 2 * 32 + 2 * 4 * 16 + 128 + 512  # queries, bases, latents, output, MLP
    none = 4 * 128 + 512  # queries, keys, values, attention, MLP
    assert per_token("dots", lrkv) == dots + 128 - none
    assert per_token("dots", lrkv, kernel=False) == dots - none
    dots, none = 128 + 2 * 32 + 128 + 512, 2 * 128 + 2 * 32 + 512
    assert per_token("dots", gqa) == dots + 128 - none


def test_the_bound_is_what_takes_longest():
    chip = dict(name="x", hbm_bytes=1, source="")
    mesh, experiment = ONE | dict(fsdp=4), make()
    flops = roofline.step_flops(experiment, causal_kernel=False)
    times = dict(
        bandwidth=roofline.hbm_bytes(experiment, mesh, causal_kernel=False) / 2,  # 2 s
        bf16_flops=flops.total / 4 / 3,  # 3 s
        interconnect=1000.0,
    )
    known = dict(mesh=mesh, causal_kernel=False)
    slow = roofline.training_step(experiment, Device(**chip, **times), wire_bytes=5000, **known)
    assert (slow.hbm, slow.compute, slow.interconnect) == pytest.approx((2, 3, 5))
    assert (slow.seconds, slow.binding) == (5, "interconnect")
    assert slow.tokens_per_second == 8192 / 5
    assert slow.days == 500 * 5 / 86_400
    per_token = formulas.training_flops_per_token(experiment.model, 256)
    assert slow.exaflops == pytest.approx(500 * 8192 * per_token / 1e18)
    assert slow.mfu == pytest.approx(8192 * per_token / (4 * flops.total / 4 / 3) / 5)
    quick = roofline.training_step(experiment, Device(**chip, **times), wire_bytes=100, **known)
    assert (quick.seconds, quick.binding) == (quick.compute, "compute")
