"""`python -m kvjax.aot`: what it says of a run, what it refuses, and what it looks for."""

import dataclasses
import json
import pathlib
import re

import jax
import pytest

from kvjax import ahead
from kvjax import aot
from kvjax import command_line
from kvjax import costs
from kvjax import devices
from kvjax import fitting
from kvjax.ahead import TooLarge
from kvjax.compiled import Memory
from kvjax.errors import UserError
from kvjax.experiment import resolve

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TINY = CONFIGS / "lrkv_tiny.py"


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
    assert aot.main(["aot", *arguments, override]) == 0
    result = json.loads(file.read_text())
    made_by = result.pop("made_by")
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    assert {"command", "commit", "packages"} <= set(made_by)
    assert result["overrides"] == [override]
    assert result["mesh"] == dict(data=1, fsdp=4, sequence=1, tensor=1)
    assert result["replicated"] == []

    model = experiment().model
    count = costs.parameters(model)["total"]
    matrices = costs.matrix_weights(model)
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
    assert 2 * once * layers / 4 <= sent("muon") <= 2 * once * layers / 4 * 1.2
    assert result["wire_bytes"] == sum(row["wire_bytes"] for row in rows)
    assert result["bound"]["interconnect"] == result["wire_bytes"] / 200e9
    assert "fits" in out and "exaFLOPs" in out


@pytest.mark.aot
def test_what_is_too_large_says_by_how_much_and_what_fits(cached, capsys):
    big = ["--config.train.batch_size=4096", "--config.data.sequence_length=2048"]
    attention = ["--config.compute.attention=xla", "--config.compute.remat=none"]
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", *big, *attention]
    assert aot.main(["aot", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(r"lrkv_tiny does not fit v5e:2x2: the compiler needs [\d,.]+ GB", error)
    assert re.search(r"over 90% of a v5e's 16 GB by [\d,.]+ GB a chip", error)
    assert re.search(r"on these 4 chips: --config.mesh.*--config.train.grad_accumulation", error)
    assert re.search(r"as it is, on \d+ chips of v5e", error)


@pytest.mark.aot
@pytest.mark.parametrize("chips", [1, 4])
def test_a_decode_step(cached, capsys, chips):
    arguments = [f"--config={TINY}", "--topology=v5e:2x2", "--step=decode", f"--chips={chips}"]
    assert aot.main(["aot", *arguments, "--batch=2", "--length=65536"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cache = 2 * 65536 * costs.cache_bytes_per_token(experiment().model, ahead.BF16) // chips
    weights = costs.weight_bytes(experiment().model, ahead.BF16)
    assert result["chips"] == chips
    assert {c["kind"] for c in result["collectives"]} == ({"all-reduce"} if chips > 1 else set())
    assert cache + weights <= result["memory"]["arguments"] < 1.2 * cache + 2 * weights
    assert result["memory"]["outputs"] < 2 * 2 * 2048 * 4  # logits; the cache is in place


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v9:2x2"], "topology 'v9:2x2'.*v5p:2x2x4.*h200:8"),
        ([], "required: --topology"),
        (["--topology=v5e:2x2", "--step=run"], "--step = 'run'"),
        (["--topology=v5e:2x2", "--step=decode", "--batch=0"], "--batch = 0"),
        (["--topology=v5e:2x2", "--sweep", "--compiles=0"], "--compiles = 0"),
        (["--topology=v5e:2x2", "--config.train.nope=1"], "no key 'nope'"),
        (["--topology=v5e:2x2", "--config=nowhere.py"], "no such file"),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert aot.main(["aot", f"--config={TINY}", *arguments]) == 2
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
    assert aot.main(["aot", f"--config={TINY}", "--topology=v5e:2x2", override]) == 2
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
    error = ahead.too_large(jax.errors.JaxRuntimeError(text), arguments=10**9)
    needed = round(needed * 2**30) + ("temporaries" in text) * 10**9
    assert (error.needed, error.there) == (needed, round(there * 2**30))
    assert f"{needed / 1e9:.1f} GB" in str(error)
    assert ahead.too_large(jax.errors.JaxRuntimeError("INTERNAL: 422.97G"), arguments=0) is None


# -- the search, with a compiler that is a formula -------------------------------------------------


def fake_step(experiment, name, temporaries):
    predicted = fitting.predict(experiment, ahead.datasheet(name))
    memory = Memory(arguments=predicted.state, outputs=0, temporaries=temporaries, program=0)
    return ahead.Step(
        device=ahead.datasheet(name),
        mesh=dataclasses.asdict(experiment.mesh),
        memory=memory,
        upper_bound=False,
        collectives=(),
        causal_kernel=True,
        whole=(),
        seconds_to_lower=0.0,
        seconds_to_compile=0.0,
        xla={},
    )


@pytest.fixture
def compiler(monkeypatch):
    """Needs `scale` times the temporaries predicted; gives up over the whole memory."""
    calls = []

    def training_step(experiment, name):
        predicted = fitting.predict(experiment, ahead.datasheet(name))
        need = round(compiler.scale * predicted.temporaries)
        calls.append(experiment)
        if predicted.state + need > ahead.datasheet(name).hbm_bytes:
            raise TooLarge("too large", predicted.state + need, 0)
        return fake_step(experiment, name, need)

    def devices_of(name):
        return jax.devices()[: int(name.partition(":")[2])]

    monkeypatch.setattr(ahead, "training_step", training_step)
    monkeypatch.setattr(fitting.topology, "get_devices", devices_of)
    compiler.calls = calls
    return compiler


MEDIUM = CONFIGS / "lrkv_128m.py"


def test_the_search_compiles_the_config_then_only_what_is_better(compiler):
    compiler.scale = 1.0
    start = experiment(MEDIUM)
    tried = fitting.search(start, "v5e:8", compiles=9, say=lambda line: None)
    assert tried[0].experiment.compute.remat == start.compute.remat
    assert [c.experiment for c in tried] == compiler.calls
    best = fitting.best(tried)
    assert best is tried[-1] and best.experiment.compute.remat == "none"
    limit = ahead.LIMIT * devices.get("v5e").hbm_bytes
    assert best.step.memory.total <= limit
    every = fitting.candidates(tried[0].experiment, devices.get("v5e"), 8)
    fits = [c for c in every if c.predicted.state + c.predicted.temporaries <= limit]
    assert best.predicted.order == min(c.predicted.order for c in fits)


def test_the_search_learns_from_what_needs_more_than_predicted(compiler):
    compiler.scale = 4.0
    tried = fitting.search(experiment(MEDIUM), "v5e:8", compiles=9, say=lambda line: None)
    best = fitting.best(tried)
    assert best.step.memory.total <= ahead.LIMIT * devices.get("v5e").hbm_bytes
    assert best.experiment.train.grad_accumulation > 1
    assert len(tried) <= 4


def test_the_search_stops_after_as_many_compiles_as_are_allowed(compiler):
    compiler.scale = 4.0
    search = lambda most: fitting.search(
        experiment(MEDIUM), "v5e:8", compiles=most, say=lambda line: None
    )
    assert len(search(9)) == 2
    assert len(search(1)) == 1


def test_the_best_has_memory_to_spare(compiler):
    """A step that compiles, in 95 % of memory, is none; slower ones that fit are."""
    found = fitting.candidates(experiment(MEDIUM), devices.get("v5e"), 8)[:3]
    for candidate, part in zip(found, (0.95, 0.5, 0.5), strict=True):
        temporaries = round(part * 16e9) - candidate.predicted.state
        candidate.step = fake_step(candidate.experiment, "v5e:8", temporaries)
    assert fitting.best(found) is found[1]
    assert fitting.best(found[:1]) is None


def test_overrides_of_a_candidate_make_it(compiler):
    compiler.scale = 1.0
    tried = fitting.search(experiment(MEDIUM), "v5e:8", compiles=9, say=lambda line: None)
    for candidate in tried:
        assert experiment(MEDIUM, *candidate.overrides) == candidate.experiment


def test_candidates_divide_what_they_must():
    found = fitting.candidates(experiment(MEDIUM), devices.get("v5e"), 16)
    for c in found:
        mesh, train = c.experiment.mesh, c.experiment.train
        assert mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor == 16
        assert train.batch_size % (train.grad_accumulation * mesh.data * mesh.fsdp) == 0
        assert 6 % mesh.tensor == 0  # heads
    assert {c.experiment.mesh.tensor for c in found} == {1, 2}
    assert {c.experiment.compute.remat for c in found} >= {"none", "dots", "full"}


def test_advice_names_accumulation_and_chips(compiler):
    start = experiment(MEDIUM, "--config.compute.remat=none")
    text = fitting.advice(start, "v5e:8", 100 * 10**9)
    assert "by 85.6 GB a chip" in text
    (here,) = re.findall(r"on these 8 chips: (.*)", text)
    (chips,) = map(int, re.findall(r"as it is, on (\d+) chips", text))
    own = fitting.predict(
        dataclasses.replace(start, mesh=dataclasses.replace(start.mesh, fsdp=8)), devices.get("v5e")
    )
    factor = (100e9 - own.state) / own.temporaries

    def needs(e):
        predicted = fitting.predict(e, devices.get("v5e"))
        return predicted.state + factor * predicted.temporaries

    on = lambda n: dataclasses.replace(start, mesh=dataclasses.replace(start.mesh, fsdp=n))
    assert needs(experiment(MEDIUM, *here.split())) <= 14.4e9
    assert needs(on(chips)) <= 14.4e9 < needs(on(chips // 2))


def test_advice_names_no_chips_that_the_batch_does_not_divide_over(compiler):
    start = experiment(MEDIUM, "--config.train.batch_size=8")
    assert "as it is" not in fitting.advice(start, "v5e:8", 20 * 10**9)
    assert "as it is, on 16 chips" in fitting.advice(experiment(MEDIUM), "v5e:8", 20 * 10**9)


def test_a_sweep_in_which_nothing_fits_is_an_error(compiler):
    compiler.scale = 1e6
    with pytest.raises(UserError, match="lrkv_128m on v5e:8: none of [12] candidates? fits.*by"):
        aot.sweep(experiment(MEDIUM), "v5e:8", 2)
