"""Decoding over quantised caches: the memory that a run holds, its tokens, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.cache import quantized
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import Scorer
from kvjax.foundation.errors import UserError
from kvjax.model.transformer import Compute
from tests import quick
from tests.decoding.prompts import GREEDY, PROMPTS, V, tokens

F32 = jnp.dtype(jnp.float32)


SHORT = 6


@pytest.fixture(autouse=True)
def rows_of_six(monkeypatch):
    """Lets rows of these small models' heads have scales, and be of four bits."""
    monkeypatch.setattr(quantized, "SHORTEST_ROW", SHORT)


def _has_long_rows(config):
    fields = config.mechanisms[0].entry().values()
    return any(f.shape[-1] >= SHORT for f in fields if not (f.wide or f.keeps))


def _quantized(bits):
    return Compute(dtype=F32, cache_bits=bits)


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("name", quick.only(["lrkv_gqa"], quick.READERS))
def test_a_run_holds_the_bytes_of_the_formula(make_model, name, bits):
    """So does the compiled step, whose cache is updated in place."""
    generator = Generator(make_model(name), _quantized(bits))
    generation = generator.start(PROMPTS, num_tokens=3, sampling=GREEDY)
    list(generation)
    cache = generation.cache
    per_token = formulas.cache_bytes_per_token(generator.config, F32, bits)
    assert cache_lib.live_bytes(cache) == per_token * len(PROMPTS) * cache.capacity
    for layer in cache.layers:
        narrow = {name for name, x in layer.items() if x.dtype.itemsize == 1}
        assert narrow == {name for name in layer if f"{name}.scale" in layer} != set()
        packed = any(layer[name].dtype == jnp.uint8 for name in narrow)
        assert packed == (bits == 4 and _has_long_rows(generator.config))
    engine, state = generator.engine, (*generation._first, generation._cancelled_B)
    step = engine.decode_step.lower(engine.weights, cache, *state, generation._sampling).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == cache_lib.live_bytes(cache) + 4 * len(PROMPTS)
    others = (engine.weights, cache.lengths, *state, generation._sampling)
    others = sum(x.nbytes for x in jax.tree.leaves(jax.tree.map(_plain, others)))
    assert memory.argument_size_in_bytes == cache_lib.live_bytes(cache) + others


def _plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("name", quick.only(["lrkv_gqa"], quick.READERS))
def test_scores_are_near_those_of_a_wide_cache(make_model, name):
    """Fewer bits are further off; a scorer's own caches are quantised too."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 11, 30).tolist(), rng.integers(0, 11, 100).tolist())] * 2
    nats = {}
    for bits in (None, 8, 4):
        scorer = Scorer(Generator(make_model(name), _quantized(bits)), batch=2)
        nats[bits] = scorer.continuations(pairs)[0].nats
    off = {bits: np.abs(nats[bits] - nats[None]).mean() for bits in (8, 4)}
    assert 0 < off[8] < 0.02 * np.std(nats[None])
    assert off[8] < off[4] or not _has_long_rows(make_model(name).config)


def test_chips_change_no_token(make_model, on_chips):
    """The longest prompt lies in stripes of two chips."""
    prompts = [*PROMPTS[:2], (np.arange(150) % 30).tolist()]
    generator = Generator(make_model("lrkv"), _quantized(8), chunk=150)
    alone = tokens(generator, prompts, num_tokens=8, sampling=GREEDY)
    split = on_chips("lrkv", 2, compute=_quantized(8))
    assert tokens(split, prompts, num_tokens=8, sampling=GREEDY) == alone


def test_a_kernel_is_refused(make_model):
    message = re.escape("implementation = 'gpu': reads no int4 cache: use 'xla'")
    with pytest.raises(UserError, match=message):
        Generator(make_model("mha"), _quantized(4), implementation="gpu")


def test_four_bits_are_said_to_cost_quality(make_model, capsys):
    Generator(make_model("mha"), _quantized(8))
    assert capsys.readouterr().err == ""
    Generator(make_model("mha"), _quantized(4))
    assert "four bits per cached number cost quality" in capsys.readouterr().err


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("name", quick.only(["lrkv_gqa"], quick.READERS))
def test_chunks_of_a_prompt_change_single_steps(make_model, name, bits):
    """In float32 an ulp before rounding may flip a step, of fewer than 1e-4 of the elements."""
    prompts = np.random.default_rng(0).integers(0, V, (8, 200)).tolist()

    def stored(chunk):
        """Returns the quantised numbers of 199 tokens, by layer and field."""
        generator = Generator(make_model(name), _quantized(bits), chunk=chunk)
        generation = generator.start(prompts, num_tokens=1, sampling=GREEDY)
        list(generation)
        numbers = []
        for layer in generation.cache.layers:
            arrays = [np.asarray(layer[n])[..., :199] for n in layer if f"{n}.scale" in layer]
            for x in arrays:
                numbers += [x & 15, x >> 4] if x.dtype == np.uint8 else [x]
        return np.concatenate([x.astype(int).ravel() for x in numbers])

    steps = np.abs(stored(16) - stored(64))
    assert steps.max() <= 1 and np.mean(steps > 0) < 1e-4
