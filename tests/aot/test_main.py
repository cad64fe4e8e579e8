"""`python -m kvjax.aot`: results, tables and errors; sweeps are in test_search.py."""

import dataclasses
import json
import math
import pathlib
import re
import time
import types

import jax
import pytest

from kvjax.aot import __main__ as aot, compilation, hlo
from kvjax.aot.compilation import TooLarge
from kvjax.config import resolve
from kvjax.costs import formulas
from kvjax.foundation import command_line, record_lines
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets
from tests import golden

TINY, MEDIUM = CONFIGS / "lrkv_tiny.py", CONFIGS / "lrkv_128m.py"
REPLICATED = (("mlp/down", 4 * 504 * 500),)


def experiment(file=TINY, *overrides):
    return resolve(command_line.load_config(pathlib.Path(file), list(overrides)))


# -- results and tables ----------------------------------------------------------------------------


def _step(arguments, **known) -> compilation.Step:
    def collective(kind, scope, times, size, group):
        op_name = f"jit(f)/{scope}/dot"
        return hlo.Collective(kind=kind, bytes=size, group=group, times=times, op_name=op_name)

    bytes_of = dict(outputs=2 * 10**7, temporaries=5 * 10**9, program=10**8)
    return compilation.Step(
        device=datasheets.get("v5e"),
        memory=hlo.Memory(arguments=arguments, **bytes_of),
        collectives=(
            collective("all-reduce", "loss", 1, 5 * 10**7, 8),
            collective("all-gather", "muon", 3, 10**9, 4),
        ),
        causal_kernel=False,
        seconds_to_lower=1.25,
        seconds_to_compile=75.0,
        **known,
    )


def test_all_that_is_printed_of_a_step_and_saved(monkeypatch, capsys, tmp_path):
    """Figures of the bound come from formulas that have tests of their own."""
    asked, mesh = [], dict(data=2, fsdp=4, sequence=1, tensor=1)
    known = dict(upper_bound=True, replicated=REPLICATED, xla=dict(flops=3e12))
    train = _step(3 * 10**9, mesh=mesh, **known)
    decode = _step(14 * 10**9, mesh=dict(cache=4), upper_bound=False, replicated=(), xla={})

    def compiled(step):
        return lambda *arguments, **shape: asked.append((arguments, shape)) or step

    monkeypatch.setattr(compilation, "training_step", compiled(train))
    monkeypatch.setattr(compilation, "decode_step", compiled(decode))
    overrides = ["--config.train.grad_accumulation=2", "--config.train.num_steps=50000"]
    shape = ["--step=decode", "--batch=3", "--length=1000", "--chips=4", "--cache_dtype=int8"]
    together, alone = tmp_path / "aot.jsonl", tmp_path / "decode.json"
    lines = []
    for options, status in (
        ([*overrides, f"--save={together}"], 0),
        ([*shape, f"--output={alone}"], 1),
    ):
        command = [f"--config={MEDIUM}", "--topology=v5e:8", "--json", "--markdown", *options]
        assert aot.main(command) == status
        out, text = capsys.readouterr()
        result = json.loads(out)
        kept = record_lines.find(together, "lrkv_128m_v5e_8") if not status else None
        kept = kept or json.loads(alone.read_text())
        assert {"libtpu", "jax-cuda13-plugin"} & kept.pop("made_by").keys() == set()
        assert kept == result
        assert ("train.grad_accumulation = 2" in result.pop("resolved")) == (not status)
        lines += [*text.splitlines()[1:], *(f"{k}: {json.dumps(v)}" for k, v in result.items())]
    golden.check_text("\n".join(lines), "aot/steps", rtol=1e-9)
    assert asked == [
        ((experiment(MEDIUM, *overrides), "v5e:8"), {}),
        ((experiment(MEDIUM), "v5e:8"), dict(batch=3, length=1000, chips=4, cache_bits=8)),
    ]
    assert aot.main([*command[:4], "--step=decode"]) == 1
    assert asked[-1][1] == dict(batch=1, length=8192, chips=1, cache_bits=None)
    assert aot.result_name("c", "v5p:2x2", "decode") == "c_v5p_2x2_decode"


# -- compiled --------------------------------------------------------------------------------------


@pytest.mark.aot
def test_a_training_step_on_four_chips(no_compilation_cache, capsys, tmp_path):
    """Fits, is sharded, gathers each matrix at least twice, and sends Muon's matrices both ways."""
    file = tmp_path / "result.json"
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", f"--output={file}"]
    override = "--config.compute.remat=full"
    assert command_line.status(aot.main, [*arguments, override, "--json"]) == 0
    result = json.loads(file.read_text())
    made_by = result.pop("made_by")
    out, tables = capsys.readouterr()
    assert json.loads(out) == result
    assert {"command", "commit", "packages"} <= set(made_by)
    assert result["overrides"] == [override]
    assert result["mesh"] == dict(data=1, fsdp=4, sequence=1, tensor=1)
    assert result["replicated"] == []
    assert result["attention"] == "causal kernel" and not result["memory_is_upper_bound"]

    model = experiment().model
    count = formulas.parameters(model)["total"]
    matrices = formulas.matrix_weights(model)
    layers = matrices["attention"] + matrices["mlp"]
    state = 4 * (3 * count - layers) // 4  # float32: parameters, Muon's moment, Adam's two
    memory = result["memory"]
    assert state <= memory["arguments"] < 2 * state  # matrices this small are mostly padding
    assert memory["outputs"] < 10_000  # the state is updated in place
    assert memory["total"] == sum(
        memory[key] for key in ("arguments", "outputs", "temporaries", "program")
    )
    assert memory["part"] == memory["total"] / 16e9

    rows = result["collectives"]

    def sent(scope):
        return sum(row["wire_bytes"] for row in rows if row["scope"] == scope)

    once = 2 * 3 / 4  # bfloat16; three of four parts come from others
    assert once * layers * 0.99 <= sent("recomputed") <= once * layers * 1.2
    assert sent("forward") >= once * (layers + matrices["head"])
    backward = {row["kind"] for row in rows if row["scope"] == "backward"}
    assert backward and "all-reduce" not in backward  # gradients are scattered, none summed whole
    assert 2 * once * layers / 4 <= sent("muon") <= 2 * once * layers / 4 * 1.2
    assert result["wire_bytes"] == sum(row["wire_bytes"] for row in rows)
    assert result["bound"]["interconnect"] == result["wire_bytes"] / 200e9
    assert "fits" in tables and "exaFLOPs" in tables


@pytest.mark.aot
def test_a_training_step_on_gpus_is_an_upper_bound(no_compilation_cache, capsys):
    """XLA's attention replaces cuDNN's, which needs its library to be compiled."""
    pytest.importorskip("jax_cuda13_plugin")
    assert command_line.status(aot.main, [f"--config={TINY}", "--topology=h200:2", "--json"]) == 0
    out, tables = capsys.readouterr()
    result = json.loads(out)
    assert result["memory_is_upper_bound"] and "an upper bound" in tables
    assert result["attention"] == "causal kernel (compiled: all T keys)"
    assert result["mesh"] == dict(data=1, fsdp=2, sequence=1, tensor=1)


@pytest.mark.aot
def test_what_is_too_large_says_by_how_much_and_what_fits(no_compilation_cache, capsys):
    big = ["--config.train.batch_size=4096", "--config.data.sequence_length=2048"]
    attention = ["--config.compute.attention=xla", "--config.compute.remat=none"]
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", *big, *attention]
    assert command_line.status(aot.main, [*arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(r"lrkv_tiny does not fit v5e:2x2: the compiler needs [\d,.]+ GB", error)
    assert re.search(r"exceeds 90% of a v5e's 16 GB by [\d,.]+ GB per chip", error)
    assert re.search(r"on these 4 chips: --config.mesh.*--config.train.grad_accumulation", error)
    assert re.search(r"unchanged, on \d+ chips of v5e", error)


@pytest.mark.aot
@pytest.mark.parametrize("chips", [1, 4])
def test_a_decode_step(no_compilation_cache, capsys, chips):
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", "--step=decode", f"--chips={chips}"]
    assert command_line.status(aot.main, [*arguments, "--batch=2", "--length=65536", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    cache = (
        2 * 65536 * formulas.cache_bytes_per_token(experiment().model, compilation.BF16) // chips
    )
    weights = formulas.weight_bytes(experiment().model, compilation.BF16)
    assert result["chips"] == chips
    assert {c["kind"] for c in result["collectives"]} == ({"all-reduce"} if chips > 1 else set())
    assert cache + weights <= result["memory"]["arguments"] < 1.2 * cache + 2 * weights
    assert result["memory"]["outputs"] < 2 * 2 * 2048 * 4  # logits; the cache is in place


def test_large_parameters_that_no_axis_splits_are_named():
    mesh = jax.make_mesh((8,), "x")

    def place(spec, *shape):
        lies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=lies)

    params = dict(
        mlp=dict(up=place((None, "x"), 500, 504), down=place((), 504, 500)),
        gain=place((), 500, 500),  # a megabyte, and no more
    )
    assert compilation._replicated(params) == (("mlp/down", 4 * 504 * 500),)


# -- bad input -------------------------------------------------------------------------------------


BAD = [
    (["--topology=v9:2x2"], "topology 'v9:2x2'.*v5p:2x2x4.*h200:8"),
    ([], "required: --topology"),
    (["--topology=v5e:2x2", "--step=run"], "--step = 'run'"),
    (["--topology=v5e:2x2", "--step=decode", "--chips=0"], "--chips = 0: must be at least 1"),
    (["--topology=v5e:2x2", "--step=decode", "--sweep"], "--sweep: only with --step=train"),
    (["--topology=v5e:2x2", "--chips=2"], "--chips = 2: only with --step=decode"),
    (["--topology=v5e:2x2", "--compiles=6"], "--compiles = 6: only with --sweep"),
    (["--topology=v5e:2x2", "--output=/dev/null/x.json"], "--output = '/dev/null'"),
    (["--topology=v5e:2x2", "--save=/dev/null/x.jsonl"], "--save = '/dev/null'"),
    (["--topology=v5e:2x2", f"--save={__file__}"], "--save: .*test_main.py, line 1: is no record"),
]


def test_bad_options(capsys):
    for arguments, message in BAD:
        assert command_line.status(aot.main, [f"--config={TINY}", *arguments]) == 2, arguments
        out, error = capsys.readouterr()
        assert re.search(f"^kvjax: .*{message}", error, re.MULTILINE), (message, error)
        assert not out


def test_what_the_compiler_says_when_memory_runs_out():
    """Units are powers of 1,024; the first message does not include the program's arguments."""
    before, used = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries ({}) exceeds available HBM ({}). HLO module: jit_train_step.",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space hbm. Used {} of {} hbm. Exceeded hbm capacity by 81.25G.",
    )
    for text, needed, there, needed_bytes, there_bytes in (
        (before, "422.97G", "15.75G", 422.97 * 2**30 + 10**9, 15.75 * 2**30),
        (used, "97.00G", "15.75G", 97 * 2**30, 15.75 * 2**30),
        (used, "1.5T", "900M", 1.5 * 2**40, 900 * 2**20),
        (used, "3000K", "17", 3000 * 2**10, 17),
    ):
        said = jax.errors.JaxRuntimeError(text.format(needed, there))
        error = compilation.too_large(said, arguments=10**9)
        assert (error.needed, error.available) == (round(needed_bytes), round(there_bytes))
        assert str(error) == (
            f"the compiler needs {needed_bytes / 1e9:.1f} GB, and a chip has "
            f"{there_bytes / 1e9:.1f} GB"
        )
    silent = compilation.too_large(RuntimeError("RESOURCE_EXHAUSTED: much\nmore"), arguments=9)
    assert (str(silent), silent.needed, silent.available) == ("RESOURCE_EXHAUSTED: much", 0, 0)
    other = jax.errors.JaxRuntimeError("INTERNAL: 422.97G")
    assert compilation.too_large(other, arguments=0) is None


# -- steps, and errors of the compiler -------------------------------------------------------------


class _Lowered:
    """A lowered program whose compilation gives a text or fails."""

    def __init__(self, error=None, text="", counted=None):
        self.error, self.text, self.counted = error, text, counted

    def compile(self):
        if self.error:
            raise self.error
        return self

    def as_text(self):
        return self.text

    def cost_analysis(self):
        return self.counted

    def memory_analysis(self):
        sizes = dict(argument=1, output=20, alias=3, temp=400, generated_code=5000)
        return types.SimpleNamespace(**{f"{key}_size_in_bytes": n for key, n in sizes.items()})


_REDUCED = """HloModule m, num_partitions=4
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %a = f32[8] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_a_step_is_what_the_compiler_says_of_it(monkeypatch):
    clock = iter([10.0, 12.0, 15.5])
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: next(clock))
    known = dict(device=datasheets.get("v4"), mesh=dict(data=2, fsdp=2), replicated=REPLICATED)
    known |= dict(upper_bound=False)
    counted = {"flops": 7.0, "bytes accessed": 8.0, "utilization": 1.0}
    lowered = _Lowered(text=_REDUCED, counted=counted)
    start = next(clock)
    step = compilation._compile(lowered, start, 0, **known)
    assert step == compilation.Step(
        memory=hlo.Memory(arguments=1, outputs=17, temporaries=400, program=5000),
        collectives=(hlo.Collective(kind="all-reduce", bytes=32, group=4),),
        causal_kernel=False,
        seconds_to_lower=2.0,
        seconds_to_compile=3.5,
        xla={"flops": 7.0, "bytes accessed": 8.0},
        **known,
    )
    assert (step.chips, step.memory_share, step.wire_bytes) == (4, 5418 / (32 * 2**30), 48.0)
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: 0.0)
    for kernel in ("splash", "__cudnn$fmha"):
        made = compilation._compile(_Lowered(text=_REDUCED + kernel), 0.0, 0, **known)
        assert made.causal_kernel and made.xla == {}

    def fits(part):
        return dataclasses.replace(
            step,
            memory=hlo.Memory(arguments=round(part * 2**35), outputs=0, temporaries=0, program=0),
        )

    assert fits(0.9).fits and not fits(0.9001).fits


def test_steps_are_those_of_a_run_for_the_devices_of_a_topology(monkeypatch):
    """CPUs replace the devices, and nothing is compiled. A GPU's attention is XLA's here."""
    small = [
        "--config.model.num_layers=1",
        "--config.mesh.tensor=2",
        "--config.data.vocab_size=998",
    ]
    e = experiment(TINY, *small, "--config.train.batch_size=4", "--config.compute.dtype=bfloat16")
    monkeypatch.setattr(compilation.topology, "get_devices", lambda name: jax.devices()[:4])
    compute, made_of, program = [], [], compilation.Program

    def noted(e, resolved, mesh):
        compute.append((e.compute, resolved.dtype))
        made_of.append(program(e, resolved, mesh))
        return made_of[0]

    monkeypatch.setattr(compilation, "Program", noted)
    monkeypatch.setattr(compilation, "_replicated", lambda params: params)
    monkeypatch.setattr(compilation, "_compile", lambda *made, **known: (made, known))
    made, known = compilation.training_step(e, "h200:4")
    lowered, start, arguments = made
    assert "train_step" in lowered.as_text()[:100]
    assert compute == [(dataclasses.replace(e.compute, attention="xla"), compilation.BF16)]
    assert known.pop("device") is datasheets.get("h200") and 0 < start <= time.perf_counter()
    placed = (made_of[0].abstract_state, made_of[0].abstract_rows)
    assert arguments == sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(placed)
    )
    assert known.pop("replicated") is made_of[0].abstract_state["params"]
    assert known == dict(mesh=dict(data=1, fsdp=2, sequence=1, tensor=2), upper_bound=True)

    made, known = compilation.decode_step(e, "v5e:2x2", batch=3, length=256, chips=2)
    cache = 3 * 256 * formulas.cache_bytes_per_token(e.model, compilation.BF16) // 2
    assert made[2] == formulas.weight_bytes(e.model, compilation.BF16) + cache
    assert known == dict(
        device=datasheets.get("v5e"), mesh=dict(cache=2), upper_bound=False, replicated=()
    )
    assert "x256xbf16>" in made[0].as_text()
    with pytest.raises(UserError, match="chips = 5: there are 4"):
        compilation.decode_step(e, "v5e:2x2", batch=3, length=256, chips=5)
    with pytest.raises(UserError, match="config.train.batch_size = 6"):
        compilation.training_step(experiment(TINY, "--config.train.batch_size=6"), "v5e:2x2")


_ENDLESS = """HloModule m, num_partitions=2
%body (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %a = f32[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}
%condition (p: f32[8]) -> pred[] {
  %p = f32[8] parameter(0)
  ROOT %r = pred[] custom-call(%p)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %w = f32[8] while(%x), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    "lowered, message",
    [
        (_Lowered(jax.errors.JaxRuntimeError("INTERNAL: Mosaic\nmore")), "INTERNAL: Mosaic$"),
        (_Lowered(text=_ENDLESS), "loop w: unknown trip count"),
    ],
)
@pytest.mark.parametrize("step", ["train", "decode"])
def test_a_compiler_that_fails_ends_in_one_message(lowered, message, step, monkeypatch, capsys):
    def fail(*_, **__):
        return compilation._compile(lowered, 0.0, 0)

    monkeypatch.setattr(compilation, "training_step", fail)
    monkeypatch.setattr(compilation, "decode_step", fail)
    assert (
        command_line.status(aot.main, [f"--config={TINY}", "--topology=v5e:2x2", f"--step={step}"])
        == 2
    )
    out, error = capsys.readouterr()
    assert re.search(f"^kvjax: lrkv_tiny does not compile for v5e:2x2: .*{message}", error, re.M)
    assert not out and "Traceback" not in error


@pytest.mark.parametrize("needed", [0, 200 * 10**9])
def test_a_decode_step_that_is_too_large_says_what_fits(needed, monkeypatch, capsys):
    def give_up(*_, **__):
        raise TooLarge("the compiler needs more", needed, 16 * 10**9)

    monkeypatch.setattr(compilation, "decode_step", give_up)
    batch, length, chips = 64, 65536, 2
    arguments = [f"--config={MEDIUM}", "--topology=v5e:4x4", "--step=decode"]
    arguments += [f"--batch={batch}", f"--length={length}", f"--chips={chips}"]
    assert command_line.status(aot.main, [*arguments]) == 2
    error = capsys.readouterr().err
    said = r"exceeds 90% of a v5e's 16 GB by 185\.6 GB" if needed else "does not report the size"
    assert re.search(f"lrkv_128m does not fit v5e:4x4: the compiler needs more.*{said}", error)
    (most,) = map(int, re.findall(r"on 2 of these chips: --batch=(\d+)", error))
    (more,) = map(int, re.findall(r"unchanged, on --chips=(\d+) of v5e", error))

    model = experiment(MEDIUM).model
    weights = formulas.weight_bytes(model, compilation.BF16)
    one = length * formulas.cache_bytes_per_token(model, compilation.BF16)
    one = max(one, (needed - weights) * chips / batch)

    def fits(batch, chips):
        return weights + batch * one / chips <= 14.4e9

    assert fits(most, chips) and not fits(most + 1, chips)
    assert fits(batch, more) and not fits(batch, more // 2)
