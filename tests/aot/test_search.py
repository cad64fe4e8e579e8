"""The search for settings that fit a topology, with a formula as the compiler, and its advice."""

import argparse
import dataclasses
import json
import re

import jax
import pytest

from kvjax.aot import __main__ as aot, compilation, roofline, search, tables, traffic
from kvjax.aot.compilation import DoesNotCompile, TooLarge
from kvjax.aot.hlo import Memory
from kvjax.config import resolve
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets
from kvjax.model.transformer import REMAT_POLICIES
from tests import golden

TINY, MEDIUM = CONFIGS / "lrkv_tiny.py", CONFIGS / "lrkv_128m.py"
OUT = Output(argparse.Namespace(json=False, markdown=True))


def experiment(file=TINY, *overrides):
    return resolve(command_line.load_config(file, list(overrides)))


def fake_step(experiment, name, temporaries, causal_kernel=True):
    predicted = search.predict(experiment, compilation.datasheet(name))
    memory = Memory(arguments=predicted.state, outputs=0, temporaries=temporaries, program=0)
    return compilation.Step(
        device=compilation.datasheet(name),
        mesh=dataclasses.asdict(experiment.mesh),
        memory=memory,
        upper_bound=False,
        collectives=(),
        causal_kernel=causal_kernel,
        replicated=(),
        seconds_to_lower=0.0,
        seconds_to_compile=0.0,
        xla={},
    )


@pytest.fixture
def compiler(monkeypatch):
    """Needs `scale` times the predicted temporaries; raises TooLarge above a chip's memory."""
    calls = []

    def training_step(experiment, name):
        predicted = search.predict(experiment, compilation.datasheet(name))
        need = round(compiler.scale * predicted.temporaries)
        calls.append(experiment)
        if (experiment.compute.remat, experiment.train.grad_accumulation) in compiler.failing:
            raise DoesNotCompile("INTERNAL: an error of the compiler")
        if predicted.state + need > compilation.datasheet(name).hbm_bytes:
            raise TooLarge("too large", compiler.says and predicted.state + need, 0)
        return fake_step(experiment, name, need)

    def devices_of(name):
        return jax.devices()[: int(name.partition(":")[2])]

    monkeypatch.setattr(compilation, "training_step", training_step)
    monkeypatch.setattr(search.topology, "get_devices", devices_of)
    compiler.calls, compiler.failing, compiler.says = calls, (), True
    return compiler


def test_the_search_compiles_the_config_then_only_what_is_better(compiler):
    compiler.scale = 1.0
    start = experiment(MEDIUM)
    tried = search.search(start, "v5e:8", compiles=9, say=lambda line: None)
    assert tried[0].experiment.compute.remat == start.compute.remat
    assert [c.experiment for c in tried] == compiler.calls
    best = search.best(tried)
    assert best is tried[-1] and best.experiment.compute.remat == "none"
    limit = compilation.LIMIT * datasheets.get("v5e").hbm_bytes
    assert best.step.memory.total <= limit
    every = search.candidates(tried[0].experiment, datasheets.get("v5e"), 8)
    fits = [c for c in every if c.predicted.state + c.predicted.temporaries <= limit]
    assert best.predicted.order == min(c.predicted.order for c in fits)


def test_the_search_learns_from_what_needs_more_than_predicted(compiler):
    compiler.scale = 3.0
    tried = search.search(experiment(MEDIUM), "v5e:8", compiles=9, say=lambda line: None)
    best = search.best(tried)
    assert best.step.memory.total <= compilation.LIMIT * datasheets.get("v5e").hbm_bytes
    assert best.experiment.train.grad_accumulation > 1
    assert len(tried) <= 4


def test_the_search_stops_after_as_many_compiles_as_are_allowed(compiler):
    compiler.scale = 3.0

    def within(most):
        return search.search(experiment(MEDIUM), "v5e:8", compiles=most, say=lambda line: None)

    assert len(within(9)) == 2
    assert len(within(1)) == 1


def test_the_best_has_memory_to_spare(compiler):
    """A step in 95 % of memory compiles but does not count; slower ones that fit do."""
    found = search.candidates(experiment(MEDIUM), datasheets.get("v5e"), 8)[:3]
    for candidate, part in zip(found, (0.95, 0.5, 0.5), strict=True):
        temporaries = round(part * 16e9) - candidate.predicted.state
        candidate.step = fake_step(candidate.experiment, "v5e:8", temporaries)
    assert search.best(found) is found[1]
    assert search.best(found[:1]) is None


def test_overrides_of_a_candidate_make_it(compiler):
    compiler.scale = 1.0
    tried = search.search(experiment(MEDIUM), "v5e:8", compiles=9, say=lambda line: None)
    for candidate in tried:
        assert experiment(MEDIUM, *candidate.overrides) == candidate.experiment


@pytest.mark.parametrize("chips, sequence", [(16, 1), (12, 3)])
def test_candidates_are_all_that_divide(chips, sequence):
    """Against an exhaustive search: 48 rows, 6 heads, widths of 768 and more; 2^n accumulations."""
    options = ("--config.train.batch_size=48", f"--config.mesh.sequence={sequence}")
    found = search.candidates(experiment(MEDIUM, *options), datasheets.get("v5e"), chips)
    expected = {
        (data, fsdp, sequence, tensor, parts, remat)
        for data in range(1, chips + 1)
        for fsdp in range(1, chips + 1)
        for tensor in (1, 2)  # of 1, 2, 4 and 8 those that divide the heads
        for parts in (1, 2, 4, 8, 16)
        for remat in REMAT_POLICIES
        if data * fsdp * sequence * tensor == chips and 48 % (data * fsdp * parts) == 0
    }
    tried = [
        (
            *dataclasses.asdict(c.experiment.mesh).values(),
            *(c.experiment.train.grad_accumulation, c.experiment.compute.remat),
        )
        for c in found
    ]
    assert set(tried) == expected and len(tried) == len(expected)
    orders = [c.predicted.order for c in found]
    assert orders == sorted(orders) and orders[0] < orders[-1]


def test_a_candidate_may_exceed_the_limit_by_a_tenth():
    """Its temporaries count by its policy's correction, else the largest, else as predicted."""
    device = datasheets.get("v5e")
    candidate = search.candidates(experiment(MEDIUM), device, 8)[0]
    remat, allowed = candidate.experiment.compute.remat, 1.1 * compilation.LIMIT * device.hbm_bytes
    for corrected, factor in (({}, 1.0), ({"other": 0.5}, 0.5), ({remat: 2.0, "other": 3.0}, 2.0)):
        for share, fits in ((0.99, True), (1.01, False)):
            temporaries = (share * allowed - 1e9) / factor
            predicted = dataclasses.replace(candidate.predicted, state=1e9, temporaries=temporaries)
            changed = search.Candidate(candidate.experiment, predicted)
            assert search.may_fit(changed, device, corrected) is fits


def test_advice_names_accumulation_and_chips(compiler):
    start = experiment(MEDIUM, "--config.compute.remat=none")
    text = search.advice(start, "v5e:8", 100 * 10**9)
    assert "by 85.6 GB per chip" in text
    (here,) = re.findall(r"on these 8 chips: (.*)", text)
    (chips,) = map(int, re.findall(r"unchanged, on (\d+) chips", text))
    own = search.predict(
        dataclasses.replace(start, mesh=dataclasses.replace(start.mesh, fsdp=8)),
        datasheets.get("v5e"),
    )
    factor = (100e9 - own.state) / own.temporaries

    def needs(e):
        predicted = search.predict(e, datasheets.get("v5e"))
        return predicted.state + factor * predicted.temporaries

    def on(n):
        return dataclasses.replace(start, mesh=dataclasses.replace(start.mesh, fsdp=n))

    assert needs(experiment(MEDIUM, *here.split())) <= 14.4e9
    assert needs(on(chips)) <= 14.4e9 < needs(on(chips // 2))


def test_advice_names_no_chips_that_the_batch_does_not_divide_over(compiler):
    start = experiment(MEDIUM, "--config.train.batch_size=8")
    over = "It exceeds 90% of a v5e's 16 GB by 5.6 GB per chip. Predicted to fit:\n"
    here = "  on these 8 chips: --config.mesh.data="
    of_eight = search.advice(start, "v5e:8", 20 * 10**9)
    assert of_eight.startswith(over + here) and "unchanged" not in of_eight
    of_many = search.advice(experiment(MEDIUM), "v5e:8", 20 * 10**9)
    assert of_many.startswith(over + here)
    assert of_many.splitlines()[2:] == ["  unchanged, on 16 chips of v5e"]


_FAILING = [("none", 2**n) for n in range(9)] + [("dots", 1)]


@pytest.mark.parametrize(
    "scale, says, failing, message",
    [
        (1e6, True, (), r"Predicted to fit|exceeds 90% of a v5e's 16 GB by"),
        (1e6, False, (), "The compiler does not report the size"),
        (1.0, True, _FAILING, "None compiled: INTERNAL"),
    ],
)
def test_a_sweep_in_which_nothing_fits_is_an_error(compiler, scale, says, failing, message):
    compiler.scale, compiler.says, compiler.failing = scale, says, failing
    with pytest.raises(
        UserError, match="lrkv_128m on v5e:8: none of 2 candidates fits. .*" + message
    ):
        aot.sweep(experiment(MEDIUM), "v5e:8", 2, OUT)


def test_advice_splits_weights_as_far_as_they_divide(compiler):
    """768 rows have whole tiles on at most 32 chips; further chips are replicas."""
    start = experiment(MEDIUM, "--config.compute.remat=full", "--config.train.batch_size=4096")
    state = search.predict(
        dataclasses.replace(start, mesh=dataclasses.replace(start.mesh, fsdp=8)),
        datasheets.get("v5e"),
    ).state
    numbers = {}
    for needed in (20 * 10**9, 400 * 10**9, 900 * 10**9):
        assert needed > state
        text = search.advice(start, "v5e:8", needed)
        pattern = r"unchanged, on (\d+) chips of v5e(?: with --config.mesh.data=(\d+))?"
        ((chips, copies),) = re.findall(pattern, text)
        numbers[needed] = int(chips), int(copies or 1)
    assert all(chips // copies in (16, 32) for chips, copies in numbers.values()), numbers
    assert [copies for _, copies in numbers.values()] == [1, 16, 64], numbers


@pytest.mark.parametrize("remat, passes, sums", [("none", 2, 4), ("full", 3, 6)])
def test_what_is_sent_by_hand(remat, passes, sums):
    """Two bytes per weight; a chip of n sends (n - 1)/n, in an all-reduce twice that."""
    mesh = dict(data=2, fsdp=4, sequence=3, tensor=5)
    e = experiment(TINY, f"--config.compute.remat={remat}", "--config.train.grad_accumulation=4")
    weights = formulas.matrix_weights(e.model)
    layers = (weights["attention"] + weights["mlp"]) / 5
    matrices = layers + weights["head"] / 5

    def gathered(fsdp):
        return 2 * 4 * passes * matrices * (fsdp - 1) / fsdp

    rows = e.train.batch_size // 4 // (2 * 4)
    activations = rows * e.data.sequence_length / 3 * e.model.block.d_model
    assert traffic.total_bytes(e, mesh) == pytest.approx(
        gathered(4)
        + 2 * 2 * 4 * matrices / 4 / 2  # gradients, over the two copies
        + sums * 4 * 2 * 2 * activations * e.model.block.num_layers * 4 / 5
        + 2 * 2 * layers * 5 / (2 * 4 * 3 * 5)  # to Muon and back
    )
    assert e.model.block.d_model == 128

    def by_fsdp(fsdp):
        return traffic.fsdp_bytes(e, mesh | dict(fsdp=fsdp), matrices)

    assert by_fsdp(16) == pytest.approx(gathered(16))
    assert by_fsdp(32) == pytest.approx(2 * gathered(32))  # of four rows each


def test_gradients_of_broken_tiles_count_as_all_reduced():
    """v4's compiler sends 27.2 GB per step and chip with 36 rows each, and 14.6 with 144."""
    plain = experiment(CONFIGS / "lrkv_2p5b.py")
    wire = {}
    for data, fsdp in ((1, 64), (4, 16)):
        mesh = dataclasses.replace(plain.mesh, data=data, fsdp=fsdp)
        device = datasheets.get("v4")
        bound = search.predict(dataclasses.replace(plain, mesh=mesh), device).bound
        wire[fsdp] = bound.interconnect * device.interconnect / 1e9
    assert wire[64] == pytest.approx(27.2, rel=0.1) and wire[16] == pytest.approx(14.6, rel=0.1)


# -- what goes wrong besides -----------------------------------------------------------------------


@pytest.mark.parametrize("scale, says", [(1.0, True), (1.5, True), (1.0, False)])
def test_a_right_prediction_of_what_is_too_large_is_not_corrected(scale, says):
    """The state is part of the needed bytes; an unknown size corrects nothing."""
    (candidate, *_) = search.candidates(experiment(MEDIUM), datasheets.get("v5e"), 8)
    p = candidate.predicted
    needed = round(p.state + scale * p.temporaries)
    candidate.too_large = TooLarge("too large", needed if says else 0, 0)
    expected = {candidate.experiment.compute.remat: pytest.approx(scale)} if says else {}
    assert search.corrections([candidate]) == expected


def test_the_nearest_candidate_is_one_with_a_number(compiler, monkeypatch):
    found = search.candidates(experiment(MEDIUM), datasheets.get("v5e"), 8)[:3]
    for candidate, needed in zip(found, (0, 30 * 10**9, 20 * 10**9), strict=True):
        candidate.too_large = TooLarge("too large", needed, 0)
    monkeypatch.setattr(search, "search", lambda *_, **__: found)
    with pytest.raises(UserError, match=r"by 5\.6 GB per chip"):
        aot.sweep(experiment(MEDIUM), "v5e:8", 3, OUT)


def test_a_sweep_goes_on_after_what_does_not_compile(compiler, capsys):
    compiler.scale, compiler.failing = 1.0, [("none", 1)]
    override = "--config.compute.remat=none"
    options = ("--topology=v5e:8", "--sweep", "--compiles=6", "--json")
    assert aot.main([f"--config={MEDIUM}", *options, override]) == 0
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report["grad_accumulation"] > 1
    first, *rest = report["candidates"]
    assert first["failure"] == "INTERNAL: an error of the compiler"
    assert first["needed_bytes"] is None and not first["fits"] and not first["compiled"]
    assert any(row["fits"] and row["compiled"] and not row["failure"] for row in rest)
    assert report["overrides"] == [override] and "compute.remat = 'none'" in report["resolved"]
    best = experiment(MEDIUM, *report["best_overrides"])
    assert (best.compute.remat, best.train.grad_accumulation) == (
        report["remat"],
        report["grad_accumulation"],
    )
    assert f"\nBest: {' '.join(report['best_overrides'])}\n" in error
    assert "did not compile: INTERNAL" in error


def test_candidates_in_a_table(capsys):
    one = dict(data=1, fsdp=1, sequence=1, tensor=1)
    row = dict(mesh=one | dict(fsdp=4, tensor=2), grad_accumulation=2, remat="dots", fits=True)
    row |= dict(predicted_bytes=1_234_567_890, bound_by="hbm", mfu=0.4567, failure="")
    row |= dict(bound_seconds=0.01234, seconds_in_sum=0.0567, needed_bytes=9_876_543_210)
    unknown = row | dict(mesh=one, needed_bytes=None, fits=False)
    failed = unknown | dict(failure="INTERNAL: no")
    tables.show_candidates([row, unknown, failed], OUT)
    golden.check_text(capsys.readouterr().out, "aot/candidates", rtol=0)


# -- decoding --------------------------------------------------------------------------------------


def test_advice_for_decoding_is_not_the_batch_that_failed():
    """Caches fit by the formulas, but the compiler fails without a size."""
    shape = dict(batch=4, length=128, chips=1)
    text = search.decode_advice(experiment(), "v5e:4x4", 0, **shape)
    assert "--batch=3\n" in text and "--chips=2 of v5e" in text


def test_a_decode_step_whose_weights_are_too_large():
    wide = experiment(MEDIUM, "--config.model.num_layers=1200")
    shape = dict(batch=1, length=128, chips=1)
    text = search.decode_advice(wide, "v5e:4x4", 30 * 10**9, **shape)
    assert "by 15.6 GB" in text and re.search(r"Weights alone are \d+\.\d GB", text)


# -- what is compiled, and what is run -------------------------------------------------------------


@pytest.mark.parametrize(
    "device, attention, kernel, shown",
    [
        ("v5e", "auto", True, "causal kernel"),
        ("v5e", "xla", False, "all T keys"),
        ("h200", "auto", False, "causal kernel (compiled: all T keys)"),
        ("h200", "xla", False, "all T keys"),
    ],
)
def test_the_bound_is_of_the_attention_that_runs(device, attention, kernel, shown, capsys):
    """On GPUs XLA's is compiled, with logits, and cuDNN's is run."""
    start = experiment(MEDIUM, f"--config.compute.attention={attention}", "--config.mesh.fsdp=8")
    step = fake_step(start, f"{device}:8", 10**9, causal_kernel=kernel)
    report = aot.training(start, f"{device}:8", step)
    assert report["attention"] == shown
    tables.show(report, OUT, limit=compilation.LIMIT)
    assert f"Attention: {shown}\n" in capsys.readouterr().out

    def flops(causal):
        return roofline.step_flops(start, causal_kernel=causal)

    runs = flops("causal" in shown)
    assert report["flops_per_step"] == dataclasses.asdict(runs)
    bound, predicted = compilation.bound(step, start), search.predict(start, step.device)
    seconds = runs.total / 8 / step.device.bf16_flops
    assert bound.compute == predicted.bound.compute == pytest.approx(seconds)

    other = experiment(MEDIUM, "--config.compute.attention=xla", "--config.mesh.fsdp=8")
    with_logits = search.predict(other, step.device).temporaries
    assert (predicted.temporaries == with_logits) == (not kernel)
    assert kernel or predicted.temporaries == with_logits
