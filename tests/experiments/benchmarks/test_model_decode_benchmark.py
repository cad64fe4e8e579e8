"""A timed decode step: bytes read, tokens, chains."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import model_decode_benchmark as benchmark
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.model import parameters


@pytest.fixture(scope="module")
def stepper():
    config = load_config(CONFIGS / "lrkv_tiny.py", ["--config.model.num_layers=1"])
    return benchmark.Stepper(config_lib.resolve(config).model)


def test_a_step_reads_the_weights_but_the_embedding(stepper):
    c = stepper.config
    every = 2 * sum(math.prod(shape) for shape in parameters.shapes(c).values())
    assert stepper.weight_bytes == every - 2 * c.vocab_size * c.block.d_model
    assert stepper.all_weight_bytes == every
    block = dataclasses.replace(c.block, tied_head=True)  # then the embedding is the head
    tied = benchmark.Stepper(dataclasses.replace(c, block=block))
    assert tied.weight_bytes == tied.all_weight_bytes == stepper.weight_bytes
    assert stepper.cache_bytes(3, 5) == 15 * formulas.cache_bytes_per_token(c, benchmark.BF16)


@pytest.mark.slow
def test_the_cache_is_updated_in_place(stepper):
    fields = len(jax.tree.leaves(stepper.cache(1, 128).layers))
    step, arguments = stepper.program(1, 128)
    text = step.lower(*arguments).as_text()
    assert text.count("tf.aliasing_output") == fields + 1  # and the lengths


@pytest.mark.slow
def test_a_step_appends_and_gives_the_most_likely_token(stepper):
    weights, cache = stepper.weights(), stepper.cache(2, 256)
    assert all(np.asarray(x, np.float32).all() for layer in cache.layers for x in layer.values())
    assert all(len(set(map(float, x.ravel()[:64]))) > 32 for x in jax.tree.leaves(cache.layers))
    before = [{k: np.asarray(x, np.float32) for k, x in layer.items()} for layer in cache.layers]
    cache = benchmark.dataclasses.replace(cache, lengths=jnp.array([7, 130], jnp.int32))
    step, arguments = stepper.program(2, 256)
    program = step.lower(*arguments).compile()
    token_B, after = program(weights, jnp.array([3, 4], jnp.int32), cache)
    assert after.lengths.tolist() == [8, 131] and token_B.dtype == jnp.int32
    for old, new in zip(before, after.layers, strict=True):
        for name, x in new.items():
            moved = np.asarray(x, np.float32) != old[name]
            slots = [
                set(np.nonzero(moved[b].any(axis=tuple(range(moved.ndim - 2))))[0].tolist())
                for b in range(2)
            ]
            assert slots == [{7}, {130}], name
    decoder = benchmark.nnx.merge(stepper._graph, weights)
    again = benchmark.dataclasses.replace(after, lengths=jnp.array([7, 130], jnp.int32))
    x_B1D, _ = jax.jit(lambda c: decoder(jnp.array([[3], [4]]), c, jnp.array([1, 1])))(again)
    best = np.asarray(decoder.logits(x_B1D)[:, 0], np.float32)
    chosen = best[np.arange(2), token_B]
    assert (best.max(axis=-1) - chosen <= 0.02 * np.abs(best).max()).all()  # bfloat16's ties


def test_seconds_are_the_slope_of_two_chains(stepper, monkeypatch):
    now, lengths = [0.0], []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    started = []

    def wait(result):  # for the device, which takes 0.25 s longer for a step than the host
        now[0] += 0.25 * len(started)
        started.clear()
        return result

    monkeypatch.setattr(benchmark.jax, "block_until_ready", wait)

    def program(weights, token_B, cache):
        now[0] += 0.125
        started.append(cache)
        lengths.append(cache.lengths.tolist())
        grown = benchmark.dataclasses.replace(cache, lengths=cache.lengths + 1)
        return token_B, grown

    cache = stepper.cache(2, 256)
    taken = benchmark.seconds_per_step(program, {}, cache, length=200, steps=4, rounds=2)
    assert taken == ([0.375, 0.375], [0.125, 0.125]) and len(lengths) == 2 + 2 * (4 + 12)
    assert min(lengths) == [200, 200] and max(lengths) == [211, 211]


def test_points_that_do_not_fit_are_skipped_with_a_reason(stepper, monkeypatch):
    small, large = (benchmark.Point(stepper, batch, 128, 2) for batch in (1, 10_000))
    monkeypatch.setattr(benchmark.Point, "measure", lambda self, program, rounds: dict(of=program))
    monkeypatch.setattr(
        benchmark.side_by_side, "compiled", lambda lower: dict.fromkeys(lower, "compiled")
    )
    (first, found), (second, why) = benchmark.measured([small, large], 1e9, 1)
    assert (first, found) == (small, dict(of="compiled")) and second == large
    assert why["why"].endswith("GB do not fit 1.0 GB")


def test_mhas_time_is_of_the_same_point():
    def row(name, batch, seconds):
        return dict(
            mechanism=name,
            batch=batch,
            length=9,
            **(dict(seconds=dict(median=seconds)) if seconds else {}),
        )

    rows = [row("MHA", 1, 2.0), row("LRKV", 1, 1.0), row("LRKV", 4, 1.0), row("MLA", 1, None)]
    assert [r.get("speedup") for r in benchmark.with_mha(rows)] == [1.0, 2.0, None, None]
