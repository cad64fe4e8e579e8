"""`python -m kvjax.aot`: what it says of a run, and what it refuses; a sweep: test_search.py."""

import json
import pathlib
import re

import jax
import pytest

from kvjax.aot import __main__ as aot
from kvjax.aot import compilation
from kvjax.aot.compilation import TooLarge
from kvjax.costs import formulas
from kvjax.experiment import resolve
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS

TINY, MEDIUM = CONFIGS / "lrkv_tiny.py", CONFIGS / "lrkv_128m.py"


def experiment(file=TINY, *overrides):
    return resolve(command_line.load_config(pathlib.Path(file), list(overrides)))


@pytest.fixture
def cached():
    """Nothing compiled for a TPU is written to JAX's cache: it could not be read back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


# -- compiled --------------------------------------------------------------------------------------


@pytest.mark.aot
def test_a_training_step_on_four_chips(cached, capsys, tmp_path):
    """Fits, is sharded, gathers every matrix at least twice, and sends Muon's there and back."""
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
    sent = lambda scope: sum(row["wire_bytes"] for row in rows if row["scope"] == scope)
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
def test_a_training_step_on_gpus_is_an_upper_bound(cached, capsys):
    """XLA's attention stands for cuDNN's, which needs its library to be compiled."""
    pytest.importorskip("jax_cuda13_plugin")
    assert command_line.status(aot.main, [f"--config={TINY}", "--topology=h200:2", "--json"]) == 0
    out, tables = capsys.readouterr()
    result = json.loads(out)
    assert result["memory_is_upper_bound"] and "an upper bound" in tables
    assert result["attention"] == "causal kernel (compiled: all T keys)"
    assert result["mesh"] == dict(data=1, fsdp=2, sequence=1, tensor=1)


@pytest.mark.aot
def test_what_is_too_large_says_by_how_much_and_what_fits(cached, capsys):
    big = ["--config.train.batch_size=4096", "--config.data.sequence_length=2048"]
    attention = ["--config.compute.attention=xla", "--config.compute.remat=none"]
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", *big, *attention]
    assert command_line.status(aot.main, [*arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(r"lrkv_tiny does not fit v5e:2x2: the compiler needs [\d,.]+ GB", error)
    assert re.search(r"over 90% of a v5e's 16 GB by [\d,.]+ GB a chip", error)
    assert re.search(r"on these 4 chips: --config.mesh.*--config.train.grad_accumulation", error)
    assert re.search(r"as it is, on \d+ chips of v5e", error)


@pytest.mark.aot
@pytest.mark.parametrize("chips", [1, 4])
def test_a_decode_step(cached, capsys, chips):
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
    assert compilation._whole(params) == (("mlp/down", 4 * 504 * 500),)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v9:2x2"], "topology 'v9:2x2'.*v5p:2x2x4.*h200:8"),
        ([], "required: --topology"),
        (["--topology=v5e:2x2", "--step=run"], "--step = 'run'"),
        (["--topology=v5e:2x2", "--step=decode", "--batch=0"], "--batch = 0"),
        (["--topology=v5e:2x2", "--sweep", "--compiles=0"], "--compiles = 0"),
        (["--topology=v5e:2x2", "--step=decode", "--chips=0"], "--chips = 0: must be at least 1"),
        (["--topology=v5e:2x2", "--step=decode", "--sweep"], "--sweep: is of --step=train"),
        (["--topology=v5e:2x2", "--chips=2"], "--chips = 2: is of --step=decode"),
        (["--topology=v5e:2x2", "--sweep", "--batch=1"], "--batch = 1: is of --step=decode"),
        (["--topology=v5e:2x2", "--length=99"], "--length = 99: is of --step=decode"),
        (["--topology=v5e:2x2", "--compiles=6"], "--compiles = 6: is of --sweep"),
        (["--topology=v5e:2x2", "--config.train.nope=1"], "no key 'nope'"),
        (["--topology=v5e:2x2", "--config=nowhere.py"], "no such file"),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert command_line.status(aot.main, [f"--config={TINY}", *arguments]) == 2
    out, error = capsys.readouterr()
    assert re.search(f"kvjax: .*{message}", error)
    assert not out


@pytest.mark.aot
@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.mesh.data=3", "config.mesh: data = 3.* 4 devices"),
        ("--config.train.batch_size=6", "config.train.batch_size = 6"),
        ("--config.mesh.tensor=8", "config.mesh: .*tensor = 8"),
    ],
)
def test_a_mesh_that_does_not_divide(override, message, capsys):
    assert command_line.status(aot.main, [f"--config={TINY}", "--topology=v5e:2x2", override]) == 2
    assert re.search(f"kvjax: {message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    "text, needed, there",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (422.97G) exceeds available HBM (15.75G). HLO module: jit_train_step.",
            422.97,
            15.75,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 97.00G of 15.75G hbm. Exceeded hbm capacity by 81.25G.",
            97.0,
            15.75,
        ),
    ],
)
def test_what_the_compiler_says_when_memory_runs_out(text, needed, there):
    error = compilation.too_large(jax.errors.JaxRuntimeError(text), arguments=10**9)
    needed = round(needed * 2**30) + ("temporaries" in text) * 10**9
    assert (error.needed, error.there) == (needed, round(there * 2**30))
    assert f"{needed / 1e9:.1f} GB" in str(error)
    assert (
        compilation.too_large(jax.errors.JaxRuntimeError("INTERNAL: 422.97G"), arguments=0) is None
    )


# -- what a compiler cannot do ---------------------------------------------------------------------


class _Lowered:
    """What lowers and then fails: in the compiler, or in a text that cannot be read."""

    def __init__(self, error=None, text=""):
        self.error, self.text = error, text

    def compile(self):
        if self.error:
            raise self.error
        return self

    def as_text(self):
        return self.text

    def cost_analysis(self):
        return {}


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
    fail = lambda *_, **__: compilation._compile(lowered, 0.0, 0)
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
    said = r"over 90% of a v5e's 16 GB by 185\.6 GB" if needed else "does not say"
    assert re.search(f"lrkv_128m does not fit v5e:4x4: the compiler needs more.*{said}", error)
    (most,) = map(int, re.findall(r"on 2 of these chips: --batch=(\d+)", error))
    (more,) = map(int, re.findall(r"as it is, over --chips=(\d+) of v5e", error))

    model = experiment(MEDIUM).model
    weights = formulas.weight_bytes(model, compilation.BF16)
    one = length * formulas.cache_bytes_per_token(model, compilation.BF16)
    one = max(one, (needed - weights) * chips / batch)
    fits = lambda batch, chips: weights + batch * one / chips <= 14.4e9
    assert fits(most, chips) and not fits(most + 1, chips)
    assert fits(batch, more) and not fits(batch, more // 2)
