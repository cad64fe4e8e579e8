"""Compares a trained model's logits from the cache with those of whole rows.

    python -m experiments.benchmarks.exactness --workdir=runs/lrkv_tiny [--positions=512] [--save]

Held-out text goes through the model twice: as whole rows, as in training, and through the cache, a
prefill chunk first and then token by token. Prints the largest difference of a logit, relative to
the position's largest logit, and the number of positions with the same greedy token. Exits with 1
if a logit differs by more than rounding, or if greedy tokens differ at a clear position, where the
largest logit leads the second by more than rounding.
"""

import itertools
import math

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option
from kvjax.data import loader, prepare
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.model import decoder as decoder_lib
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer
from kvjax.workdir import trained

ROUNDING = 1e-4  # relative to the row's largest logit
PREFILLS = (1, 128)  # tokens that enter the cache in one chunk


def held_out(workdir: epath.Path, positions: int, rows: int) -> np.ndarray:
    """Returns tokens [rows, positions] of a run's validation text: its packed rows, concatenated.

    Raises:
      UserError: not a workdir, or too little text.
    """
    dataset = loader.open_dataset(prepare.prepare(trained.experiment_of(workdir).data))
    T = dataset.sequence_length
    joined = math.ceil(positions / T)
    available = dataset.num_rows("validation")
    if rows * joined > available:
        raise UserError(
            f"--rows={rows} --positions={positions}: the held-out text of {workdir} has "
            f"{available * T:,} tokens; give {available // joined} rows or fewer"
            + (f" of at most {available * T} positions" if joined > available else "")
        )
    batches = loader.validation_batches(dataset, sequence_length=T, batch_size=rows * joined)
    return next(iter(batches))[:, :T].reshape(rows, joined * T)[:, :positions]


def from_cache(
    model: Transformer, tokens_BT: np.ndarray, *, prefill: int, compute: Compute
) -> np.ndarray:
    """Returns logits [B, T, V]: `prefill` tokens in one chunk, the rest one by one."""
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
    """Returns the largest difference relative to the scale, and the agreement of greedy tokens.

    A position is clear if its first logit leads the second by more than rounding.
    """
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


def measure(loaded: trained.LoadedModel, tokens_BT: np.ndarray) -> list[dict]:
    """Compares logits from the cache with those of whole rows, for each size of the first chunk."""
    compute = loaded.compute
    whole = jax.jit(lambda model, tokens: model.logits(model(tokens, compute=compute)))
    full_BTV = np.asarray(whole(loaded.model, tokens_BT))
    results = []
    for prefill in PREFILLS:
        cached_BTV = from_cache(loaded.model, tokens_BT, prefill=prefill, compute=compute)
        comparison = compare(full_BTV, cached_BTV)
        results.append(comparison | dict(prefill=prefill, step=loaded.step))
    return results


def _measure(options: runner.Options) -> dict:
    workdir = epath.Path(options.workdir)
    tokens_BT = held_out(workdir, options.positions, options.rows)
    with progress.waiting("whole rows, then token by token from the cache"):
        return dict(results=measure(trained.load(workdir), tokens_BT))


_COLUMNS = {
    "prefilled": "{prefill}",
    "positions": "{positions}",
    "largest difference / scale": "{largest_difference:.1e}",
    "same token": "{same_token} of {positions}",
    "where clear": "{same_token_where_clear} of {clear_positions}",
}


def _status(result: dict) -> int:
    """Returns 1 if decoding from the cache disagrees with whole rows."""
    return any(
        r["largest_difference"] >= ROUNDING or r["same_token_where_clear"] < r["clear_positions"]
        for r in result["results"]
    )


main = runner.benchmark(
    "exactness",
    __doc__,
    dict(
        workdir=Option("runs/lrkv_tiny", "workdir of a trained run"),
        positions=Option(512, "tokens of a row", least=max(PREFILLS)),
        rows=Option(4, "number of rows", least=1),
    ),
    _measure,
    lambda result, out: out.table(*runner.table(_COLUMNS, result["results"])),
    status=_status,
)

if __name__ == "__main__":
    command_line.run(main)
