"""Stop strings and special tokens end a text; prompts and stop strings are lists."""

from flax import nnx
import jax
import numpy as np
import pytest

from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text import generate
from kvjax.foundation.errors import UserError


@pytest.fixture(scope="module")
def generator(loaded):
    return Generator(loaded.model, loaded.compute)


@pytest.mark.slow
def test_a_stop_string_ends_the_work_too(loaded, generator):
    options = dict(num_tokens=20, sampling=Sampling(temperature=0.0))
    make = lambda **keys: generate(generator, loaded.tokenizer, ["a", "bc"], **options, **keys)
    free = make()
    stop = free.texts[0][2]
    cut = make(stop=[stop])
    assert cut.texts[0] == free.texts[0][: free.texts[0].index(stop)]
    assert cut.tokens[0] == free.tokens[0][: len(cut.texts[0]) + 1]


@pytest.mark.slow
def test_special_tokens_end_a_text(loaded):
    """A model in which every token is followed by BOS."""
    bos = loaded.tokenizer.bos_id
    graph, params = nnx.split(loaded.model)
    params = nnx.to_pure_dict(params)
    params["head"] = np.zeros_like(params["head"])
    params["head"][0, bos] = 1e3
    # Activations are all but the embedding's first channel, which is the same for every token.
    params["embedding"] = np.zeros_like(params["embedding"])
    params["embedding"][:, 0] = 1e3
    for segment in params["segments"].values():
        segment["attention"]["out"] = np.zeros_like(segment["attention"]["out"])
        segment["mlp"]["down"] = np.zeros_like(segment["mlp"]["down"])
    model = nnx.merge(graph, jax.tree.map(jax.numpy.asarray, params))
    generator = Generator(model, loaded.compute)
    options = dict(num_tokens=3, sampling=Sampling(temperature=0.0))
    assert generate(generator, loaded.tokenizer, ["a", "b"], **options).texts == ["", ""]
    options["end_at_special"] = False
    assert generate(generator, loaded.tokenizer, ["a"], **options).texts == ["<|bos|>" * 3]


@pytest.mark.slow
def test_the_ends_of_a_tokenizer_end_a_text(loaded, generator, monkeypatch):
    options = dict(num_tokens=20, sampling=Sampling(temperature=0.0))
    make = lambda **keys: generate(generator, loaded.tokenizer, ["a"], **options, **keys).tokens[0]
    free = make()
    monkeypatch.setattr(loaded.tokenizer, "ends", (free[2],))
    cut = make()
    assert cut == free[: len(cut)] and free.index(free[2]) <= len(cut) < len(free)
    assert make(end_at_special=False) == free


def test_one_string_is_no_list_of_them(loaded, generator):
    make = lambda prompts, **stop: generate(
        generator, loaded.tokenizer, prompts, num_tokens=2, **stop
    )
    with pytest.raises(UserError, match="prompts = 'ab' is one string: give a list"):
        make("ab")
    with pytest.raises(UserError, match="stop = 'x' is one string: give a list"):
        make(["ab"], stop="x")
