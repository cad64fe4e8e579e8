"""Collectives of compiled programs: from text as compilers write it, and by hand for small ones."""

import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from kvjax.aot import hlo
from kvjax.aot.hlo import Collective

HLO = pathlib.Path(__file__).parent / "hlo"
# As libtpu prints a program: a loop without a trip count, whose collective starts in one fusion,
# goes on in another and is awaited in a third; a reduce-scatter hidden in a fusion; tuples.
TPU = (HLO / "tpu.hlo").read_text()


def test_what_a_tpu_hides_is_counted_once_per_turn_of_its_loop():
    gather, scatter, reduce = hlo.collectives(TPU)
    assert (gather.kind, gather.times, gather.group, gather.scope) == (
        *("all-gather", 12, 4),
        "attention",
    )
    assert gather.bytes == 128 * 4 * 16 * 2
    assert gather.wire_bytes == gather.bytes * 3 / 4
    assert (scatter.kind, scatter.times, scatter.scope) == ("reduce-scatter", 12, "mlp")
    assert scatter.bytes == 2 * (128 * 4 * 32 + 512 * 128)
    assert scatter.wire_bytes == scatter.bytes * 3 / 4
    assert (reduce.kind, reduce.times, reduce.scope) == ("all-reduce", 1, "muon")  # by its user
    assert reduce.bytes == 4 * (1 + 3)
    assert reduce.wire_bytes == 2 * reduce.bytes * 3 / 4


def test_a_loop_turns_from_its_start_to_its_end_in_its_steps():
    later = TPU.replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[] constant(5)")
    later = later.replace("%one = s32[]{:T(128)} constant(1)", "%one = s32[] constant(4)")
    assert hlo.collectives(later)[0].times == 2  # 5, 9


def test_a_loop_that_turns_an_unknown_number_of_times_is_an_error():
    unknown = TPU.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="while.1: unknown trip count"):
        hlo.collectives(unknown)


def test_groups():
    sizes = {
        "{{0,1},{2,3},{4,5},{6,7}}": [2],
        "[2,4]<=[8]": [4],
        "[4,2]<=[2,4]T(1,0)": [2],
        "mesh['data'=2,'fsdp'=4] {'fsdp'}": [4],
        "mesh['data'=2,'fsdp'=4] {'data','fsdp'}": [8],
        "mesh['fsdp'=8] {'fsdp':(2)4}": [4],
        "{}": [8],
        "{{0},{1},{2},{3},{4},{5},{6},{7}}": [],  # nobody to talk to
    }
    for groups, size in sizes.items():
        text = f"""HloModule m, num_partitions=8
ENTRY %main (x: f32[8]) -> f32[64] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %g = f32[64]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}
}}
"""
        assert [c.group for c in hlo.collectives(text)] == size, groups


_BRANCHES = """HloModule m, replica_count=6
%compared (i.2: s32[]) -> pred[] {
  %i.2 = s32[] parameter(0)
  %end = s32[] constant(17)
  ROOT %le = pred[] compare(%i.2, %end), direction=LE
}
%until (c.2: (f32[8], s32[])) -> pred[] {
  %c.2 = (f32[8], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%c.2), index=1
  ROOT %fused = pred[] fusion(%i.3), kind=kLoop, calls=%compared
}
%body.2 (c.3: (f32[8], s32[])) -> (f32[8], s32[]) {
  %c.3 = (f32[8], s32[]) parameter(0)
  %x.3 = f32[8] get-tuple-element(%c.3), index=0
  %i.4 = s32[] get-tuple-element(%c.3), index=1
  %step = s32[] constant(3)
  %next.2 = s32[] add(%i.4, %step)
  %all = (s4[6,3], s4[6,3]) all-to-all-start(%x.3), replica_groups={}
  ROOT %t.2 = (f32[8], s32[]) tuple(%x.3, %next.2)
}
%left (x.4: f32[8]) -> f32[8] {
  %x.4 = f32[8] parameter(0)
  %flags = (pred[5], token[]) all-reduce(%x.4), replica_groups={{0,1,2},{3,4,5}}
  ROOT %r = f32[8] negate(%x.4)
}
%right (x.5: f32[8]) -> f32[8] {
  %x.5 = f32[8] parameter(0)
  ROOT %sent = f32[8] collective-broadcast(%x.5), replica_groups={{0,1}}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %p = pred[] parameter(1)
  %begin = s32[] constant(-2)
  %bits = s32[] bitcast(%begin)
  %state = (f32[8], s32[]) tuple(%x, %bits)
  %loop = (f32[8], s32[]) while(%state), condition=%until, body=%body.2
  ROOT %either = f32[8] conditional(%p, %x, %x), branch_computations={%left, %right}
}
"""


def test_loops_that_fuse_their_condition_and_both_branches():
    """The loop's counter is its second number: -2, 1 .. 16; four bits are half a byte."""
    found = [(c.kind, c.bytes, c.group, c.times, c.wire_bytes) for c in hlo.collectives(_BRANCHES)]
    assert found == [
        ("all-to-all", 9, 6, 7, 7.5),
        ("all-reduce", 5, 3, 1, 20 / 3),
        ("collective-broadcast", 32, 2, 1, 32),
    ]
    plain = _BRANCHES.replace("tuple(%x, %bits)", "tuple(%x, %x)")  # an unknown start counts as 0
    assert hlo.collectives(plain)[0].times == 6
    two = "%c.2 = (f32[8], s32[]) parameter(0)\n  %x.2 = f32[8] get-tuple-element(%c.2), index=0"
    several = _BRANCHES.replace("%c.2 = (f32[8], s32[]) parameter(0)", two)
    assert hlo.collectives(several)[0].times == 18  # which of two counts? from 0 in steps of 1
    never = _BRANCHES.replace("constant(17)", "constant(-9)")
    assert hlo.collectives(never)[0].times == 0


def test_asynchronous_collectives_as_a_gpu_has_them():
    gather, scatter, other, permute, reduce = hlo.collectives((HLO / "gpu.hlo").read_text())
    assert (gather.kind, gather.times, gather.bytes) == ("all-gather", 15, 64 * 4)
    assert (scatter.kind, scatter.times, scatter.bytes) == ("reduce-scatter", 15, 64 * 4)
    assert (other.kind, other.times, other.bytes) == ("reduce-scatter", 15, 64 * 4)
    assert (permute.kind, permute.bytes, permute.wire_bytes) == ("collective-permute", 32, 32)
    assert [c.group for c in (gather, scatter, other, permute, reduce)] == [8, 8, 8, 8, 2]
    assert (reduce.bytes, reduce.wire_bytes) == (64, 64)


def test_launches_leave_out_what_computes_nothing():
    assert hlo.launches(_BRANCHES) == {"loop": "(f32[8], s32[])", "either": "f32[8]"}
    started = hlo.launches((HLO / "gpu.hlo").read_text())
    assert list(started) == ["while.3", "permute", "reduce"]


def test_a_summary_adds_up_by_kind_and_scope():
    def made(kind, scope, times):
        return Collective(kind=kind, bytes=80, group=8, times=times, op_name=f"jit(f)/{scope}/dot")

    found = [made("all-reduce", "loss", 1), made("all-gather", "", 2)]
    found += [made("all-gather", "muon", times) for times in (3, 4)]
    assert hlo.summary(found) == [
        dict(kind="all-gather", scope="muon", count=7, bytes=560, wire_bytes=490.0),
        dict(kind="all-reduce", scope="loss", count=1, bytes=80, wire_bytes=140.0),
        dict(kind="all-gather", scope="other", count=2, bytes=160, wire_bytes=140.0),
    ]


# -- programs on eight CPU devices, counted by hand ------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices())


def compile_mapped(mesh, function, in_specs, out_specs, *shapes):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    return jax.jit(mapped).lower(*arguments).compile()


def test_an_all_gather_in_a_scan_of_five(mesh):
    """Each turn gathers [3, 5] from [3, 20] split over 4: 3 · 20 · 4 bytes, of which 3/4 travel."""

    def gather(x):
        def turn(total, i):
            whole = jax.lax.all_gather(x + i * total, "b", axis=1, tiled=True)
            return jnp.sum(jnp.sin(whole)), None

        return jax.lax.scan(turn, jnp.float32(0), jnp.arange(5.0))[0]

    program = compile_mapped(mesh, gather, (P(None, "b"),), P(), (3, 20))
    (found,) = hlo.collectives(program.as_text())
    assert (found.kind, found.times, found.group) == ("all-gather", 5, 4)
    assert found.bytes == 3 * 20 * 4
    assert found.wire_bytes == 3 * 15 * 4


_ON_B = dict(axis_name="b", tiled=True)
_RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize(
    "function, kind, sent",
    [
        (lambda x: jax.lax.psum(x, "b"), "all-reduce", 2 * 48 * 4),
        (lambda x: jax.lax.psum_scatter(x, **_ON_B), "reduce-scatter", 48 * 4),
        (
            lambda x: jax.lax.all_to_all(x, split_axis=0, concat_axis=0, **_ON_B),
            "all-to-all",
            48 * 4,
        ),
        (lambda x: jax.lax.ppermute(x, "b", perm=_RING), "collective-permute", 64 * 4),
    ],
)
def test_each_kind_in_nested_loops(mesh, function, kind, sent):
    def twice_three(x):
        def inner(y, _):
            return (jnp.sin(x + jnp.sum(function(y))), None)

        def outer(y, _):
            return jax.lax.scan(inner, y, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=2)[0]

    program = compile_mapped(mesh, twice_three, (P(("a", "b")),), P(("a", "b")), (8 * 64,))
    found = [c for c in hlo.collectives(program.as_text()) if c.kind == kind]
    assert sum(c.times * c.bytes for c in found) == 6 * 64 * 4
    assert sum(c.times * c.wire_bytes for c in found) == 6 * sent


def test_memory_is_what_lies_on_one_device(mesh):
    double = jax.jit(lambda x, y: (x + 1, jnp.tanh(y @ y.T)), donate_argnums=0)

    def place(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("b")))

    memory = hlo.memory(double.lower(place((4, 1000)), place((64, 32))).compile())
    assert memory.arguments == 4 * (1000 + 16 * 32)
    assert 4 * 16 * 64 <= memory.outputs <= 4 * 16 * 64 + 64  # x is updated in place; a tuple
    assert memory.temporaries >= 4 * 64 * 32  # y, gathered
    assert memory.total >= memory.arguments + memory.outputs + memory.temporaries


def test_scopes():
    scopes = {
        "jit(f)/transpose(jvp(loss))/dot": "loss",
        "jit(f)/transpose(jvp())/while/body/checkpoint/attention/dot": "attention",
        "jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot": "recomputed",
        "jit(f)/transpose(jvp())/while/body/dot": "backward",
        "jit(f)/jvp()/while/body/dot": "forward",
        "state['params']['head']": "head",
        "jit(f)/per_head/dot": "other",
        "mlp/muon": "muon",
        "optimizer/embedding/latents": "latents",
        "optimizer/embedding": "embedding",
        "optimizer/mlp": "mlp",
        "optimizer": "optimizer",
    }
    for op_name, scope in scopes.items():
        assert Collective(kind="all-gather", bytes=1, group=2, op_name=op_name).scope == scope


def test_wire_bytes_of_one_device_are_none():
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        assert Collective(kind=kind, bytes=np.int64(10), group=1).wire_bytes == 0
