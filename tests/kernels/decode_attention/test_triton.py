"""The kernel for Ampere and Ada GPUs, interpreted, and compiled for an A100 and an L4."""

import builtins
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.decode_attention import api, shapes
from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.gpu import attention as gpu, triton
from kvjax.kernels.decode_attention.shapes import Quantized
from kvjax.kernels.profile import gpu_static
from tests.kernels.decode_attention import agreement

D12 = {name: shapes.SHAPES["d12"][name] for name in shapes.OURS}
PLAIN = GroupedSizes(N=2, K=2)
slow = pytest.mark.slow


def _jitted(**options):
    return jax.jit(functools.partial(triton.decode_attention, interpret=True, **options))


@pytest.mark.parametrize(
    "shape, firsts",
    [
        (GroupedSizes(N=6, K=2, H=64, Hv=192), (63, 256)),
        (ResidualSizes(N=4, K=4, Hv=64), (200,)),
        (Quantized(ResidualSizes(N=8, K=4, J=2, Hv=64)), (200,)),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                (GroupedSizes(N=1, K=1), (0, 63, 64, 127, 128, 200)),
                (GroupedSizes(N=4, K=4, H=32), (190,)),  # thin keys: two heads share a slab
                (GroupedSizes(N=18, K=1, H=64, Hv=64), (150,)),  # 32 rows
                (ResidualSizes(N=8, K=4, J=2, Hv=64), (0, 127, 255)),  # LRKV x GQA
                (ResidualSizes(N=3, K=3, R=128, H=64, Hv=64), (255,)),
                (ResidualSizes(N=4, K=2, H=64, Hv=192, rope_base=None, scaled=False), (200,)),
                (FactoredSizes(N=4, K=2, J=2, Hv=64), (0, 200)),
                (FactoredSizes(N=4, K=4, J=4, R=32, Rv=32, Hv=64), (200,)),  # two share a slab
                (FactoredSizes(N=8, K=4, J=2, R=32, Hv=64, rope_base=None), (200,)),
                (LatentSizes(N=3, C=128), (130,)),
                (LatentSizes(N=4, C=128, J=2, key_channels=64, Hv=0), (200,)),  # GTA
                (Quantized(GroupedSizes(N=4, K=4, H=32)), (63, 256)),
                (
                    Quantized(ResidualSizes(N=4, K=2, H=64, Hv=192, rope_base=None, scaled=False)),
                    (200,),
                ),
                (Quantized(FactoredSizes(N=4, K=4, J=4, R=32, Rv=32, Hv=64)), (200,)),
                (Quantized(FactoredSizes(N=8, K=4, J=2, R=32, Hv=64, rope_base=None)), (200,)),
                (Quantized(LatentSizes(N=4, C=128, J=2)), (200,)),  # the RoPE key is in bfloat16
            )
        ),
    ],
)
def test_equals_the_definition(shape, firsts):
    """Slots after a sequence's end hold NaN; some splits of 128 tokens are not reached."""
    run = _jitted(split=128)
    agreement.check(run, shape, firsts=firsts, length=256, dtype=jnp.bfloat16, behind=np.nan)


@slow
@pytest.mark.parametrize("name", D12)
def test_equals_the_definition_at_d12(name):
    agreement.check(_jitted(), D12[name], firsts=(1151, 1024), length=1152, dtype=jnp.bfloat16)


def _on(kind: str):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=100, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("gpu",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _problem(shape):
    return shapes.abstract(shape, batch=1, length=128, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "kind, shape, module",
    [
        ("NVIDIA A100-SXM4-40GB", PLAIN, triton),
        ("NVIDIA L4", Quantized(PLAIN), triton),
        ("NVIDIA H200", PLAIN, gpu),
        ("NVIDIA H100", Quantized(PLAIN), gpu),
        ("NVIDIA H200", Quantized(LatentSizes(N=32, C=640)), triton),
        ("NVIDIA H200", LatentSizes(N=32, C=640), None),
        ("Tesla T4", PLAIN, None),
        ("NVIDIA B200", PLAIN, None),
    ],
)
def test_the_card_chooses_the_kernel(monkeypatch, kind, shape, module):
    """A GPU without one decodes by XLA; the reason names it. Hopper runs both for int8."""
    chosen = []
    monkeypatch.setattr(triton, "decode_attention", lambda *_, **__: chosen.append(triton))
    monkeypatch.setattr(gpu.kernel, "attend", lambda *_, **__: chosen.append(gpu) or [])
    monkeypatch.setattr(gpu.combine, "combine", lambda *_, **__: jnp.zeros((1, 2, 128)))
    arguments = _problem(shape)
    with _on(kind):
        assert api.default(*arguments) == ("gpu" if module else "xla")
        if module is None:
            message = f"8 .* 9 .*here {kind}" if shape is PLAIN else "registers for 32 queries"
            with pytest.raises(NotImplementedError, match=f"{message}.*; use 'xla'"):
                gpu.check(*arguments)
            return
        first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
        jax.eval_shape(gpu.decode_attention, *arguments, first_B)
    assert chosen == [module]


def test_without_pallas_triton_xla_decodes(monkeypatch):
    """JAX has announced that it will be removed."""

    def without(name, *arguments, **options):
        if "pallas.triton" in name or "triton" in (
            arguments[2] or () if len(arguments) > 2 else ()
        ):
            raise ImportError(name)
        return load(name, *arguments, **options)

    load = builtins.__import__
    monkeypatch.delitem(sys.modules, triton.__name__)
    monkeypatch.setattr(builtins, "__import__", without)
    with _on("NVIDIA A100"), pytest.raises(NotImplementedError, match="needs Pallas-Triton"):
        gpu.check(*_problem(GroupedSizes(N=2, K=2)))


def test_scales_that_short_rows_share_are_refused():
    inputs, cache = _problem(Quantized(GroupedSizes(N=8, K=8, H=8)))
    cache["base_key.scale"] = cache["base_key.scale"].update(shape=(1, 1, 1, 128))
    with pytest.raises(NotImplementedError, match="a scale for each row of base_key"):
        gpu.check(inputs, cache)


def test_more_sums_than_registers_are_refused():
    with _on("NVIDIA L4"), pytest.raises(NotImplementedError, match="64 queries on 8 slabs"):
        gpu.check(*_problem(LatentSizes(N=64, C=512)))


def test_more_rank_queries_than_shared_memory_are_refused():
    """Keys of all heads from one latent, as `thin_keys --mode=joint` converts a Llama."""
    for heads, cards in ((32, ("A100-SXM4-80GB", "L4")), (8, ("L4",))):
        shape = FactoredSizes(N=heads, K=8, J=1, R=64, Rv=64)
        for card in cards:
            with (
                _on(f"NVIDIA {card}"),
                pytest.raises(NotImplementedError, match=f" {heads} queries in rank space"),
            ):
                gpu.check(*_problem(shape))
    with _on("NVIDIA A100-SXM4-80GB"):
        gpu.check(*_problem(shape))


@pytest.mark.aot
@pytest.mark.parametrize("device", ["a100", "l4"])
@pytest.mark.parametrize(
    "model, name",
    [
        *(("d36", name) for name in (*D12, "mha_int8", "lrkv_int8", "mla_int8")),
        ("most", "factored"),
        ("d12", "lrkv"),
        ("d12", "mla"),
    ],
)
def test_compiles_without_spills_or_a_copy_of_the_cache(device, model, name):
    pytest.importorskip("jax_cuda13_plugin")
    few = FactoredSizes(N=8, K=4, J=2, R=64, Rv=64)  # four queries in rank space; eight:
    most = few if device == "l4" else FactoredSizes(N=16, K=8, J=2, R=64, Rv=64)
    shape = most if model == "most" else shapes.SHAPES[model][name]
    kernels, program = gpu_static.compiled(shape, batch=4, length=32_768, device=device)
    figures, ptx = kernels["decode_attention"]
    few = dict(lrkv_int8=12, mla_int8=32) if device == "l4" else {}
    assert figures["spill_bytes"] <= few.get(name, 0)
    # Copies are 16 bytes wide, and those of the loop run ahead (of MLA on an L4 they do not fit);
    # products are on tensor cores.
    ahead = re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10", ptx)
    assert ahead or ((device, name) == ("l4", "mla") and re.search(r"ld\.global\S*\.v4\.", ptx))
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16" in ptx
    temporary = program.memory_analysis().temp_size_in_bytes
    cache = 4 * 32_768 * shapes.bytes_per_token(shape, jnp.bfloat16)
    assert temporary < 0.2 * cache  # the splits' sums
