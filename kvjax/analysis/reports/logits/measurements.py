"""Measures every head's logits, on texts at several lengths."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import activations, heads as heads_lib, logits, truncation
from kvjax.analysis.measures.activations import Layer, Mask
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation import progress

RANKS = (10, 20, 40)  # logit spectra, section 4.3
_ALL_KEYS = Mask(causal=False)

# Matrices whose spectra are measured.
WEIGHTS = "M, without RoPE"
WEIGHTS_AT_DISTANCES = "M, at distances"
AVERAGED_WEIGHTS = "M, mean over pairs"
LOGITS = "E"
CAUSAL_LOGITS = "E, causal"
LOGITS_WITHOUT_ROPE = "E, without RoPE"

Kind = tuple[str, int]  # (one of these matrices, tokens of the text; 0: weights without RoPE)


@dataclasses.dataclass(frozen=True)
class LogitMeasurements:
    """Measurements of all layers; nan where a layer has fewer heads or channels than others.

    Attributes:
      ranks: ranks that logits are truncated to.
      key_dim: channels of a head's key.
      energies: [layers, texts, N, R] by kind, descending, padded with zeros. For weights, the
        second axis is not over texts: it has one matrix, or one per distance.
      errors: [layers, texts, N, ranks, 3] `truncation.TruncationErrors` by number of tokens, and
        True for the causal mask.
      bounds: [layers, texts, N, ranks] `logits.softmax_bound` by number of tokens.
      delocalisation: [layers, texts, N, R] by number of tokens.
      keys: [layers, texts, K, 2] `logits.KeyGeometry` by number of tokens.
      perplexity: [texts] by number of tokens and rank; rank 0 is the unmodified model.
    """

    ranks: tuple[int, ...]
    key_dim: int
    energies: Mapping[Kind, np.ndarray]
    errors: Mapping[tuple[int, bool], np.ndarray]
    bounds: Mapping[int, np.ndarray]
    delocalisation: Mapping[int, np.ndarray]
    keys: Mapping[int, np.ndarray]
    perplexity: Mapping[tuple[int, int], np.ndarray]


def measure(
    model: LazyModel,
    texts: Mapping[str, np.ndarray],
    lengths: Sequence[int],
    *,
    perplexity_at: Sequence[int] = (),
    perplexity_tokens: int = 1024,
) -> LogitMeasurements:
    """Measures the first tokens of each text.

    Args:
      lengths: numbers of tokens.
      perplexity_at: numbers of tokens per row for which perplexity is measured at each rank.
      perplexity_tokens: tokens per text that perplexity is measured on, split into rows.

    Raises:
      UserError: weights or activations that are not finite.
    """
    arrays_by_name = collections.defaultdict(list)
    with progress.waiting("logit spectra") as doing:
        rotates = any(kind.rope_base is not None for kind in model.transformer.block.layer_kinds)
        key_dim = 0
        for heads in heads_lib.layers(model):
            key_dim = max(key_dim, heads.key_DKH.shape[-1])
            for kind, energies_ANR in _of_weights(heads, max(lengths) if rotates else 0):
                arrays_by_name["energies", kind].append(energies_ANR)
        ranks = _ranks(key_dim)
        # In a causal model, one pass on the longest rows serves all lengths.
        causal = model.transformer.block.causal
        passes = [tuple(lengths)] if causal else [(length,) for length in lengths]
        for pass_lengths in passes:
            rows_BT = _rows(texts, max(pass_lengths))
            for i, layer in enumerate(activations.layers(model, rows_BT)):
                doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
                for length in pass_lengths:
                    for key, array in _of_layer(layer, length, ranks, rotates).items():
                        arrays_by_name[key].append(array)
        doing.now("perplexity under logits of low rank")
        perplexity = {}
        for length in perplexity_at:
            for rank in (0, *ranks):
                doing.at(f"rank {rank or key_dim} at {length} tokens")
                tokens = max(perplexity_tokens, length)
                perplexity[length, rank] = _perplexities(model, texts, length, tokens, rank)

    def measurements_of(name, fill):
        return {
            key[1]: _stacked(arrays, fill)
            for key, arrays in arrays_by_name.items()
            if key[0] == name
        }

    return LogitMeasurements(
        ranks=ranks,
        key_dim=key_dim,
        energies=measurements_of("energies", 0.0),
        errors=measurements_of("errors", np.nan),
        bounds=measurements_of("bounds", np.nan),
        delocalisation=measurements_of("delocalisation", np.nan),
        keys=measurements_of("keys", np.nan),
        perplexity=perplexity,
    )


def _ranks(key_dim: int) -> tuple[int, ...]:
    """Returns the paper's ranks that are below key_dim; if there are none, key_dim / 4 and / 2."""
    narrow = {max(1, key_dim // 4), max(1, key_dim // 2)}
    return tuple(r for r in RANKS if r < key_dim) or tuple(sorted(narrow))


def distances(length: int) -> list[int]:
    """Returns 0, 1 and powers of two up to a length."""
    return [0] + [1 << i for i in range((length - 1).bit_length())]


def _of_weights(heads: heads_lib.Heads, length: int) -> Iterator[tuple[Kind, np.ndarray]]:
    """Yields each kind of weights and its [matrices, N, R] energies.

    Args:
      length: limit of the distance between query and key; 0 if the model has no RoPE.
    """
    with few_threads(len(heads.query_DNH)):
        interaction = logits.Interaction(heads)
        yield (WEIGHTS, 0), interaction.energies()[None]
        if length:
            yield (
                (WEIGHTS_AT_DISTANCES, length),
                np.stack(list(map(interaction.energies_at, distances(length)))),
            )
            yield (AVERAGED_WEIGHTS, length), interaction.energies_averaged(length)[None]


def _of_layer(
    layer: Layer, length: int, ranks: Sequence[int], rotates: bool
) -> dict[tuple, np.ndarray]:
    """Returns a layer's [texts, N or K, ...] measurements at a length.

    Keys are (a field of `LogitMeasurements`, a key of that field).
    """
    arrays_by_name, causal = collections.defaultdict(list), layer.mask.causal
    for b in range(len(layer.query_BTNH)):
        query, key, value = (
            x[b, :length] for x in (layer.query_BTNH, layer.key_BTKH, layer.value_BTKH)
        )
        with few_threads(length):
            centred = logits.centred_logits(query, key, layer.scale)
            arrays_by_name["energies", (LOGITS, length)].append(centred.energies_NR)
            if rotates:
                without_rope = (
                    layer.plain_query_BTNH[b, :length],
                    layer.plain_key_BTKH[b, :length],
                )
                arrays_by_name["energies", (LOGITS_WITHOUT_ROPE, length)].append(
                    logits.energies(*without_rope, layer.scale)
                )
            bounds = [logits.softmax_bound(centred, rank) for rank in ranks]
            arrays_by_name["bounds", length].append(np.stack(bounds, axis=-1))
            arrays_by_name["delocalisation", length].append(logits.delocalisation(centred))
            arrays_by_name["keys", length].append(np.stack(logits.key_geometry(key), axis=-1))
        for mask in (_ALL_KEYS, layer.mask) if causal else (_ALL_KEYS,):
            errors = truncation.errors(centred, value, ranks, mask, layer.softcap)
            arrays_by_name["errors", (length, mask.causal)].append(np.stack(errors, axis=-1))
        if causal:
            energies_NL = logits.masked_energies(query, key, layer.scale, layer.mask)
            arrays_by_name["energies", (CAUSAL_LOGITS, length)].append(energies_NL)
    return {name: np.stack(arrays) for name, arrays in arrays_by_name.items()}


def _stacked(arrays: list[np.ndarray], fill: float) -> np.ndarray:
    """Returns [layers, ...] arrays, padded with `fill` where a layer is smaller."""
    shape = np.max([x.shape for x in arrays], axis=0)
    stacked = np.full((len(arrays), *shape), fill)
    for i, x in enumerate(arrays):
        stacked[(i, *map(slice, x.shape))] = x
    return stacked


def _rows(texts: Mapping[str, np.ndarray], length: int) -> np.ndarray:
    return np.stack([tokens_T[:length] for tokens_T in texts.values()])


def _perplexities(
    model: LazyModel, texts: Mapping[str, np.ndarray], length: int, tokens: int, rank: int
) -> np.ndarray:
    """Returns [texts] perplexities on rows of `length` tokens.

    Args:
      tokens: number of tokens per text, split into rows.
      rank: rank of the logits; 0: unmodified.
    """
    shortest = min(map(len, texts.values()))
    width = min(length + 1, shortest)
    count = min(tokens // length, shortest // width)
    rows_BT = _rows(texts, count * width).reshape(-1, width)
    attend = truncation.attention_of_rank(rank) if rank else None
    with few_threads(width):
        nats_BT = activations.losses(model, rows_BT, attend)
    return np.exp(nats_BT.reshape(len(texts), -1).mean(axis=1, dtype=np.float64))
