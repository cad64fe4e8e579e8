"""Compares kvjax's logits of published models with transformers' stored ones."""

import pathlib

from flax import nnx, traverse_util
import jax.numpy as jnp
import numpy as np

from kvjax.convert import published
from kvjax.convert.model import LazyModel
from kvjax.model import decoder as decoder_lib, parameters
from kvjax.model.decoder import Decoder
from kvjax.model.parameters import Path
from kvjax.model.transformer import Transformer

PUBLISHED = pathlib.Path(__file__).parent / "published"
MODELS = sorted(path.parent.name for path in PUBLISHED.glob("*/logits.npz"))
# In standard deviations of the logits. Rounding of float32 gives 1e-6 to 5e-6; the smallest effect
# of a wrong option, a GELU by tanh instead of erf, is 4e-4.
TOLERANCE = 3e-5


def model_of(source: LazyModel) -> Transformer:
    """Returns the model with its parameters, in float32."""
    graph = parameters.graph(source.transformer)
    weights = {path: jnp.asarray(w, jnp.float32) for path, w in whole(source).items()}
    return nnx.merge(graph, traverse_util.unflatten_dict(weights))


def whole(source: LazyModel) -> dict[Path, np.ndarray]:
    """Returns every parameter with all of its layers, in its own dtype."""
    by_path = {}
    for path, (shape, dtype) in source.parameters().items():
        if path[0] == "segments":
            array = np.stack([source.read(path, layer) for layer in range(shape[0])])
        else:
            array = source.read(path)
        assert array.shape == shape and array.dtype == dtype, path
        by_path[path] = array
    return by_path


def difference(folder: pathlib.Path) -> float:
    """Returns the largest difference from the stored logits, in their standard deviations."""
    stored = np.load(folder / "logits.npz")
    return difference_of(published.open(folder), stored["tokens"], stored["logits"])


def difference_of(source: LazyModel, tokens_BT: np.ndarray, theirs_BTV: np.ndarray) -> float:
    """Returns the largest difference from other logits, in their standard deviations."""
    ours_BTV = logits(source, tokens_BT)
    assert ours_BTV.shape == theirs_BTV.shape and ours_BTV.dtype == np.float32
    return float(np.abs(ours_BTV - theirs_BTV).max() / theirs_BTV.std())


def logits(source: LazyModel, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns kvjax's logits [B, T, V] in float32."""
    compute = nnx.jit(lambda model, tokens_BT: model.logits(model(tokens_BT)))
    return np.asarray(compute(model_of(source), tokens_BT))


def greedy(source: LazyModel, tokens_BT: np.ndarray, new: int) -> np.ndarray:
    """Returns the most likely continuation, [B, new], decoded over a cache."""
    decoder = Decoder(model_of(source))
    B, T = tokens_BT.shape
    cache = decoder_lib.allocate(source.transformer, decoder.compute, batch=B, capacity=T + new)

    @nnx.jit
    def step(decoder, tokens_BT, cache):
        counts_B = jnp.full(B, tokens_BT.shape[1], jnp.int32)
        x_BTD, cache = decoder(tokens_BT, cache, counts_B)
        return decoder.logits(x_BTD[:, -1:]).argmax(-1), cache

    found = []
    for _ in range(new):
        tokens_BT, cache = step(decoder, tokens_BT, cache)
        found.append(np.asarray(tokens_BT))
    return np.concatenate(found, axis=1)


def exactly(found: LazyModel, expected: LazyModel) -> None:
    """Fails unless both have the same parameters, bit for bit."""
    assert found.transformer == expected.transformer
    ours, theirs = whole(found), whole(expected)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert array.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(array, theirs[path], err_msg=str(path))
