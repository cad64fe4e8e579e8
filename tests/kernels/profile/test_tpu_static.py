"""Counts of executed bundles in TPU schedules: recorded, written by hand, and compiled."""

import collections
import json
import os
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import pytest

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.kernels.profile import tpu_schedule, tpu_static

RECORDED = pathlib.Path(__file__).parent / "tpu_schedules"


def _recorded(kind):
    """Returns the schedule of a kernel with 4 grid steps on blocks of 256 tokens.

    A step that a sequence reaches adds its block in 2 iterations of a loop.
    """

    def text(name):
        return (RECORDED / f"{kind}_{name}.txt").read_text()

    return tpu_schedule.Schedule(text("bundles"), text("use"))


@pytest.mark.parametrize("kind, body", [("v5e", 8), ("v4", 14)])
def test_a_schedule_is_followed_as_far_as_the_sequence_reaches(kind, body):
    schedule, chip = _recorded(kind), tpu_static.CHIPS[kind]

    def run(last):
        return schedule.executed(last, core=0, delay=chip.delay)

    for steps in (1, 2, 4):
        counts = run(256 * steps - 1)
        assert (run(256 * (steps - 1)) == counts).all()
        # The loop's bundles run twice a step; the grid's, once a step and twice for its pipeline.
        expected = {1, 4, 6} | {2 * steps}
        assert set(counts.tolist()) == expected
    assert ((run(1023) - run(511)) == 4).sum() == body
    assert (run(1023) - run(511)).sum() == 4 * body


def test_bundles_per_token_are_those_that_the_second_half_adds():
    schedule, chip = _recorded("v5e"), tpu_static.CHIPS["v5e"]
    cost = tpu_static.count([schedule, schedule], chip, 1024)
    assert cost.bundles == 2 * 4 * 8 / 512
    body = schedule.executed(1023, core=0, delay=4) == 8
    loads = schedule.use[body][:, schedule.units.index("VLOAD")].sum()
    assert loads == 2  # the block and the sum
    assert cost.units["VLOAD"] == pytest.approx(2 * 4 * loads / 3 / 512)
    unshared = tpu_static.count(
        [schedule], tpu_static.CHIPS["v5p"], 1024
    )  # cores that share nothing
    assert unshared.bundles == cost.bundles
    with pytest.raises(tpu_static.DoesNotCompile, match="does not depend on how long"):
        tpu_static.count([schedule], chip, 256)


def _dumped(folder, names, kernel="kernel.7"):
    """Writes libtpu's dumps of programs; one of them is a Pallas kernel."""
    ends = dict(bundles="packed-bundles-post-ra", use="pre-delay_hlo-static-per-bundle-utilization")
    for name in names:
        for kind, end in ends.items():
            text = (RECORDED / f"v5e_{kind}.txt").read_text()
            (folder / f"123-{name}-45-{end}.txt").write_text(text)
        target = "tpu_custom_call" if name == kernel else "Sharding"
        analysis = f'  %{name} = f32[8] custom-call(), custom_call_target="{target}"\n'
        end = "46-schedule-analysis_packed-bundles-post-ra.txt"
        (folder / f"123-{name}-{end}").write_text(analysis)


def test_a_kernel_is_compiled_in_a_process_that_dumps_its_schedule(monkeypatch, tmp_path):
    ran, status, stderr = [], 0, ""

    def run(command, *, env, **options):
        ran.append((command, env, options))
        folder = pathlib.Path(re.search(r"--xla_jf_dump_to=(\S+)", env["LIBTPU_INIT_ARGS"])[1])
        _dumped(folder, ["kernel.7", "copy.7", "kernelx7"])
        return types.SimpleNamespace(returncode=status, stderr=stderr)

    monkeypatch.setattr(tpu_static.subprocess, "run", run)
    monkeypatch.setattr(tpu_static, "LENGTH", 1024)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--given")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    chip = tpu_static.CHIPS["v5e"]

    def per_token(**sizes):
        return tpu_static.per_token(chip, "d12", "gqa", **sizes)

    assert per_token(tile_kv=512, score_tile=256) == tpu_static.count(
        [_recorded("v5e")], chip, 1024
    )
    ((command, environment, options),) = ran
    sizes = dict(tile_kv=512, score_tile=256)
    assert command[1:] == ["-m", tpu_static.__spec__.name, "v5e", "d12", "gqa", json.dumps(sizes)]
    assert options == dict(capture_output=True, text=True, check=False)
    assert environment["PYTHONPATH"] == f"{ROOT}{os.pathsep}elsewhere"
    assert environment["JAX_PLATFORMS"] == "cpu" and environment["PATH"] == os.environ["PATH"]
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    flags = r"--given --xla_jf_dump_to=\S+ --xla_jf_dump_llo_text=true"
    assert re.fullmatch(flags, environment["LIBTPU_INIT_ARGS"])
    status, stderr = 2, "kvjax: needs libtpu\n"
    with pytest.raises(UserError, match="^kvjax: needs libtpu$"):
        per_token()
    status, stderr = 1, "File x\nValueError: first\njax.errors.JaxRuntimeError: INTERNAL: why\nmore"
    with pytest.raises(
        tpu_static.DoesNotCompile, match="^tile_kv 512, score_tile 256: INTERNAL: why$"
    ):
        per_token(tile_kv=512, score_tile=256)
    status, stderr = 1, ""
    with pytest.raises(tpu_static.DoesNotCompile, match="^tile_kv 512: the compiler failed$"):
        per_token(tile_kv=512)
    count = len(ran)
    with pytest.raises(NotImplementedError, match="the TPU kernel has no parameter tiles"):
        per_token(tiles=512)
    with pytest.raises(NotImplementedError, match="the TPU kernels take caches"):
        monkeypatch.setattr(tpu_static, "DTYPE", jnp.dtype(jnp.float16))
        per_token()
    assert len(ran) == count  # neither came as far as a process
    _dumped(tmp_path, ["copy.7"])
    with pytest.raises(tpu_static.DoesNotCompile, match="wrote no schedule of a Pallas kernel"):
        tpu_static.read(tmp_path)


def test_compilation_in_such_a_process(monkeypatch):
    compiled = []
    monkeypatch.setattr(tpu_static.topology, "tpu_devices", lambda name: [name, "other"])
    monkeypatch.setattr(
        tpu_static.topology, "compile_for", lambda device, f, *x: compiled.append((device, f, x))
    )
    options_used = []

    def attend(*arrays, **options):
        options_used.append(options)
        return arrays[0].query

    monkeypatch.setitem(tpu_static.IMPLEMENTATIONS, "tpu", attend)
    tpu_static._compile("v4", "d12", "gqa", '{"tile_kv": 512}')
    ((device, function, (inputs, cache, first_B)),) = compiled
    jax.eval_shape(function, inputs, cache, first_B)
    assert (device, options_used) == ("v4:2x2x1", [dict(tile_kv=512)])
    assert inputs.query.shape == (1, 1, 6, 128) and inputs.query.dtype == jnp.bfloat16
    assert cache["base_key"].shape == (1, 3, 128, 32_768) and first_B.dtype == jnp.int32


USE = "== CAPACITY:\nVLOAD, SALU\n 3 2\n== UTILIZATION:\n"


def _schedule(*bundles):
    lines = [f"{hex(i) if i else 0}   : > {{ {text} }}" for i, text in enumerate(bundles)]
    return tpu_schedule.Schedule("\n".join(lines), USE + "0 0\n" * len(bundles))


def test_scalar_arithmetic():
    table = [
        ((5, 7), "ssub.s32 {}, {}", 2**32 - 2),
        ((2**32 - 1, 2), "sadd.s32 {}, {}", 1),
        ((2**32 - 8, 2), "sshra.s32 {}, {}", 2**32 - 2),
        ((2**32 - 8, 2), "sshrl.u32 {}, {}", 2**30 - 2),
        ((3, 31), "sshll.u32 {}, {}", 2**31),
        ((2**16 + 1, 2**17), "smul.u32 {}, {}", 2**17),
        ((6, 3), "sand.u32 {}, {}", 2),
        ((6, 3), "sor.u32 {}, {}", 7),
        ((6, 3), "sxor.u32 {}, {}", 5),
        ((2**32 - 1, 3), "smin.u32 {}, {}", 3),
        ((2**32 - 1, 3), "smin.s32 {}, {}", 2**32 - 1),
        ((2**32 - 1, 3), "smax.u32 {}, {}", 2**32 - 1),
        ((2**32 - 1, 3), "smax.s32 {}, {}", 3),
    ]
    a, b = ("%s1_s1", "%s2_s2")
    for operands, operation, expected in table:
        schedule = _schedule(
            f"%s1_s1 = smov {operands[0]}  ;;  %s2_s2 = smov {operands[1]}",
            f"%s3_s3 = {operation.format(a, b)}  ;;  %4 = x /* two\n lines  ;;  %s5_s3 = smov 0 */",
            f"%p4_p0 = scmp.eq.s32.totalorder %s3_s3, {expected}",
            "%5 = sbr.rel (%p4_p0) target bundleno = 5 (0x5)",
            "",
            "",
        )
        counts = schedule.executed(0, core=0, delay=0).tolist()
        assert counts == [1, 1, 1, 1, 0, 1], operation


def test_scalars_are_read_before_they_are_written_and_guards_hold():
    schedule = _schedule(
        "%s1_s1 = smov 1  ;;  %s2_s2 = smov 2  ;;  %p3_p3 = scmp.lt.s32.totalorder 4294967295, 0",
        "%s3_s1 = smov %s2_s2  ;;  %s4_s2 = smov %s1_s1",  # swapped
        "%s5_s1 = smov (!%p3_p3, %s3_s1), 9  ;;  %6 = sst [smem:[#a + $0x3]] %s4_s2",
        "%s8_s5 = scalar_select /*predicate=*/%p3_p3, /*on_true=*/3, /*on_false=*/0",
        "%s7_s4 = sadd.s32 %s5_s1, 1  ;;  %s9_s6 = sld [smem:[#a + %s8_s5]]",
        "%p1_p1 = pnand %p3_p3, %p3_p3",
        "%p10_p0 = scmp.ne.s32.totalorder %s9_s6, 1",  # 1 was stored at #a + 3
        "%p11_p2 = scmp.ne.s32.totalorder %s7_s4, 3",
        "%11 = sbr.rel (%p10_p0) target bundleno = 0 (0x0)",
        "%p12_p2 = por %p11_p2, %p1_p1",
        "%13 = sbr.rel (%p12_p2) target bundleno = 0 (0x0)",
    )
    assert schedule.executed(0, core=0, delay=0).tolist() == [1] * 11


def test_bundles_behind_a_taken_branch_run():
    branch = "%1 = sbr.rel target bundleno = 4 (0x4)"
    schedule = _schedule(branch, "", "", "", "")
    counts = [schedule.executed(0, core=0, delay=d).tolist() for d in (0, 1, 3)]
    assert counts == [[1, 0, 0, 0, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]]


def test_cores_share_a_grid():
    schedule = _schedule(
        "%s1_s1 = sld [smem:[#allocation2]] /* megacore core id :: core id */",
        "%p2_p0 = scmp.ne.s32.totalorder %s1_s1, 0",
        "%3 = sbr.rel (%p2_p0) target bundleno = 4 (0x4)",
        "",
        "",
    )
    runs = [schedule.executed(0, core=core, delay=0).tolist() for core in (0, 1)]
    assert runs == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]


def test_schedules_that_cannot_be_followed(monkeypatch):
    unknown = _schedule(
        "%s1_s1 = spop %v0_v0",
        "%p2_p0 = scmp.ne.s32.totalorder %s1_s1, 0",
        "%3 = sbr.rel (%p2_p0) target bundleno = 0 (0x0)",
    )
    with pytest.raises(tpu_schedule.CannotFollow, match="bundle 0x2 branches on an unknown scalar"):
        unknown.executed(0, core=0, delay=0)
    with pytest.raises(tpu_static.DoesNotCompile, match="cannot be followed: bundle 0x2"):
        tpu_static.count([unknown], tpu_static.CHIPS["v5e"], 1024)
    monkeypatch.setattr(tpu_schedule, "_MAX_BUNDLES", 100)
    forever = _schedule("%3 = sbr.rel target bundleno = 0 (0x0)")
    with pytest.raises(tpu_schedule.CannotFollow, match="no end after 100"):
        forever.executed(0, core=0, delay=0)
    with pytest.raises(tpu_schedule.CannotFollow, match="1 bundles, but utilization of 2"):
        tpu_schedule.Schedule("     0   :  {}\n", USE + "0 0\n0 0\n")


def test_clocks_and_hbm_cycles():
    cycles = {name: chip.hbm_cycles(5120) for name, chip in tpu_static.CHIPS.items()}
    assert cycles == pytest.approx(dict(v4=8.75, v5e=9.40, v5p=6.48, v6e=5.47), abs=0.01)
    clocks = {name: chip.clock / 1e9 for name, chip in tpu_static.CHIPS.items()}
    assert clocks == pytest.approx(dict(v4=1.05, v5e=1.50, v5p=1.75, v6e=1.75), abs=0.005)


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e"])
def test_real_kernels_are_counted(kind):
    chip = tpu_static.CHIPS[kind]
    cost = tpu_static.per_token(chip, "d12", "lrkv", tile_kv=512)
    assert max(cost.units.values()) <= cost.bundles < 10
    # Per head and slot: the whole table times the query in rank space, or a basis of rank 32, by
    # which latents of two heads, one of them zeros, and the queries of 128 slots are multiplied.
    products = 64 * 128 if kind in ("v4", "v6e") else 128 * 32 + 64 * 32
    assert cost.units["MXU"] >= 6 * products / chip.macs


def test_recorded_schedules_are_all_used():
    files = collections.Counter(f.name.partition("_")[0] for f in RECORDED.iterdir())
    assert files == dict(v4=2, v5e=2)
