"""A trained model, teacher-forced from the cache against recomputing everything.

    python -m experiments.exactness --workdir=runs/lrkv_tiny [--positions=512] [--save]

Held-out text goes through the model twice: as whole rows, the way training sees them, and through
the cache, a prefill chunk first and then token by token. Reported are the largest difference of a
logit, as a part of the row's largest logit, and at how many positions both choose the same next
token; where the two best of the full pass differ by more than rounding, that must be all. Prints a
table, and one JSON line.
"""

import itertools
import math
import sys

from absl import app
from absl import flags
from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments import record
from kvjax import runtime
from kvjax import trained
from kvjax.data import loader
from kvjax.data import prepare
from kvjax.model import decoder as decoder_lib
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer

ROUNDING = 1e-4  # of the row's largest logit


def held_out(workdir: epath.Path, positions: int, rows: int) -> np.ndarray:
    """[rows, positions] tokens of a run's validation text, training rows joined end to end."""
    dataset = loader.open_dataset(prepare.prepare(trained.experiment_of(workdir).data))
    T = dataset.sequence_length
    joined = math.ceil(positions / T)
    batches = loader.validation_batches(dataset, sequence_length=T, batch_size=rows * joined)
    return next(iter(batches))[:, :T].reshape(rows, joined * T)[:, :positions]


def from_cache(
    model: Transformer, tokens_BT: np.ndarray, *, prefill: int, compute: Compute
) -> np.ndarray:
    """[B, T, V] logits: `prefill` tokens in one chunk, the rest one by one."""
    graph, weights = nnx.split(Decoder(model, compute))
    B, T = tokens_BT.shape

    def step(weights, tokens, cache):
        decoder = nnx.merge(graph, weights)
        counts_B = jnp.full((B,), tokens.shape[1], jnp.int32)
        x_BTD, cache = decoder(tokens, cache, counts_B)
        return decoder.logits(x_BTD), cache

    step = jax.jit(step, donate_argnums=2)
    cache = decoder_lib.allocate(model.config, compute, batch=B, capacity=T)
    cuts = [0, *range(prefill, T + 1)]
    parts = []
    for start, stop in itertools.pairwise(cuts):
        logits, cache = step(weights, tokens_BT[:, start:stop], cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


def compare(full_BTV: np.ndarray, cached_BTV: np.ndarray) -> dict:
    """Largest difference over scale, and agreement of the greedy token."""
    scale_BT1 = np.abs(full_BTV).max(-1, keepdims=True)
    second, first = np.sort(full_BTV, axis=-1)[..., -2:].transpose(2, 0, 1)
    clear_BT = (first - second) / scale_BT1[..., 0] > ROUNDING
    same_BT = full_BTV.argmax(-1) == cached_BTV.argmax(-1)
    return dict(
        largest_difference=float((np.abs(cached_BTV - full_BTV) / scale_BT1).max()),
        positions=same_BT.size,
        same_token=int(same_BT.sum()),
        clear_positions=int(clear_BT.sum()),
        same_token_where_clear=int((same_BT & clear_BT).sum()),
    )


def main(argv) -> None:
    del argv
    runtime.start()
    workdir = epath.Path(_WORKDIR.value)
    loaded = trained.load(workdir)
    tokens_BT = held_out(workdir, _POSITIONS.value, _ROWS.value)
    whole = jax.jit(lambda model, tokens: model.logits(model(tokens, compute=loaded.compute)))
    full_BTV = np.asarray(whole(loaded.model, tokens_BT))
    results = []
    print(
        "| prefilled | rows x positions | largest difference / scale | same token | where clear |"
    )
    print("|---:|---:|---:|---:|---:|")
    for prefill in (1, 128):
        cached_BTV = from_cache(loaded.model, tokens_BT, prefill=prefill, compute=loaded.compute)
        r = compare(full_BTV, cached_BTV) | dict(prefill=prefill, step=loaded.step)
        results.append(r)
        print(
            f"| {prefill} | {tokens_BT.shape[0]} x {tokens_BT.shape[1]} "
            f"| {r['largest_difference']:.1e} | {r['same_token']} of {r['positions']} "
            f"| {r['same_token_where_clear']} of {r['clear_positions']} |"
        )
    record.record("exactness", dict(results=results), save=_SAVE.value)
    exact = all(
        r["largest_difference"] < ROUNDING and r["same_token_where_clear"] == r["clear_positions"]
        for r in results
    )
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string(
        "workdir", "runs/lrkv_tiny", "A trained run; its held-out text is read."
    )
    _POSITIONS = flags.DEFINE_integer("positions", 512, "Tokens of a row.")
    _ROWS = flags.DEFINE_integer("rows", 4, "Rows.")
    _SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/exactness.json.")
    app.run(main)
