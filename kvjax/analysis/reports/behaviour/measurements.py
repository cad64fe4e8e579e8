"""Measures every head's attention patterns on texts."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import (
    activations,
    cka,
    diversity,
    heads as heads_lib,
    logits,
    patterns,
)
from kvjax.analysis.measures.activations import Layer, Mask
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError

WINDOWS = 2  # consecutive windows that are measured of each text
MAP_TOKENS = 64  # rows and columns of an attention map
_REPEATED_ROWS = 8  # sequences of repeated random tokens
_CKA_TOKENS = 512  # tokens, over all sequences, whose features CKA compares
STATISTICS = patterns.Statistics._fields  # Behaviour adds "content_N" and "induction_N"


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Attention patterns of one layer's heads, and distances between heads.

    Attributes:
      num_kv_heads: K; query head n reads KV head n // (N / K).
      mask: the layer's mask.
      statistics: [N] means over sequences, by name: `patterns.Statistics`, "content_N" and
        "induction_N". "content_N" is the divergence between a head's patterns on two sequences (of
        different texts if there are several); nan for a single sequence.
      divergence_NN, without_first_NN: divergences between patterns of two heads in nats, over all
        keys, and over all except the first.
      outputs_NN: CKA of heads' outputs.
      weights_NN: similarity of the forms W_Q W_K^T (`diversity`). None if there is only one head,
        or if queries or keys are not linear in the input.
      text_NTT: each head's pattern on the first tokens of the first sequence.
      repeated_NTT: each head's pattern on a sequence of repeated tokens.
    """

    num_kv_heads: int
    mask: Mask
    statistics: Mapping[str, np.ndarray]
    divergence_NN: np.ndarray
    without_first_NN: np.ndarray
    outputs_NN: np.ndarray
    weights_NN: np.ndarray | None
    text_NTT: np.ndarray
    repeated_NTT: np.ndarray

    @property
    def num_heads(self) -> int:
        return len(self.divergence_NN)

    def pairs(self, x_NN: np.ndarray, shared: bool | None = None) -> np.ndarray:
        """Returns the entries of a matrix [N, N] for pairs of different heads.

        Args:
          shared: True for pairs that share a KV head, False for other pairs, None for all.
        """
        first, second = np.triu_indices(self.num_heads, 1)
        group_N = np.arange(self.num_heads) * self.num_kv_heads // self.num_heads
        is_shared = group_N[first] == group_N[second]
        return x_NN[first, second][slice(None) if shared is None else is_shared == shared]


@dataclasses.dataclass(frozen=True)
class BehaviourMeasurements:
    """Attention patterns of all layers, and how they were measured.

    Attributes:
      length: tokens per sequence.
      sequences: number of sequences.
      block: number of random tokens that are repeated.
      induction_by_chance: induction score of uniform attention, mean over layers.
      inputs_LL, outputs_LL: CKA between layers, of attention's inputs and of all heads' outputs.
    """

    layers: Sequence[Behaviour]
    length: int
    sequences: int
    block: int
    induction_by_chance: float
    inputs_LL: np.ndarray
    outputs_LL: np.ndarray

    @property
    def num_heads(self) -> int:
        return sum(layer.num_heads for layer in self.layers)

    def statistic(self, name: str) -> list[np.ndarray]:
        """Returns [N] by layer."""
        return [layer.statistics[name] for layer in self.layers]


def measure(
    model: LazyModel, texts: Mapping[str, np.ndarray], length: int, seed: int
) -> BehaviourMeasurements:
    """Measures all layers, one at a time.

    Raises:
      UserError: activations are not finite.
    """
    rows_BT, others_B = _rows(texts, length)
    # A repeated token's first occurrence must lie within the window of every layer.
    windows = {kind.window for kind in model.transformer.block.layer_kinds if kind.window}
    block = min(MAP_TOKENS // 2, length // 2, *windows)
    tokens_A = np.unique(np.concatenate(list(texts.values())))
    if len(tokens_A) < block:
        tokens_A = np.arange(model.transformer.vocab_size)
    block = min(block, len(tokens_A))
    repeated_BT = patterns.repeated(tokens_A, block, _REPEATED_ROWS, seed)
    chosen_T = np.unique(
        np.linspace(0, rows_BT.size - 1, min(_CKA_TOKENS, rows_BT.size)).astype(int)
    )
    layers, inputs, outputs = [], [], []
    with progress.waiting("attention patterns") as doing:
        passes = (activations.layers(model, rows_BT), activations.layers(model, repeated_BT))
        for i, (layer, repeated) in enumerate(zip(*passes, strict=True)):
            doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
            behaviour, output_TNH = _of_layer(layer, repeated, block, chosen_T, others_B)
            layers.append(dataclasses.replace(behaviour, weights_NN=_weights(model, i)))

            def features(x):
                return x.reshape(len(chosen_T), -1).astype(np.float32)

            inputs.append(features(_tokens(layer.input_BTD)[chosen_T]))
            outputs.append(features(output_TNH))
        doing.now("similarity of layers")
        return BehaviourMeasurements(
            layers=layers,
            length=length,
            sequences=len(rows_BT),
            block=block,
            induction_by_chance=_induction_by_chance(layers, block),
            inputs_LL=cka.linear_cka(inputs),
            outputs_LL=cka.linear_cka(outputs),
        )


def _rows(texts: Mapping[str, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns [B, T] windows from the beginning of each text, and [B] indices of other windows.

    A window's patterns are compared with those on the other window, which is from the next text, or
    from the same text if there is only one.
    """
    counts = [min(WINDOWS, len(tokens_T) // length) for tokens_T in texts.values()]
    rows = [
        tokens_T[: count * length].reshape(count, length)
        for tokens_T, count in zip(texts.values(), counts, strict=True)
    ]
    first = np.cumsum([0, *counts])
    others = []
    for text, count in enumerate(counts):
        following = (text + 1) % len(counts)
        for i in range(count):
            if len(counts) > 1:
                others.append(first[following] + i % counts[following])
            else:
                others.append((i + 1) % count)
    return np.concatenate(rows), np.array(others)


def _tokens(x_BTD: np.ndarray) -> np.ndarray:
    """Returns [B·T, ...] values of the tokens of all sequences."""
    return x_BTD.reshape(-1, *x_BTD.shape[2:])


def _weights(model: LazyModel, index: int) -> np.ndarray | None:
    """Returns a layer's `Behaviour.weights_NN`."""
    try:
        with few_threads(model.transformer.block.d_model):
            return diversity.of_layer(heads_lib.of_layer(model, index)).similarity_NN
    except UserError:  # one head, or queries and keys that are not linear in the input
        return None


def _induction_by_chance(layers: Sequence[Behaviour], block: int) -> float:
    """Returns the induction score of uniform attention, mean over layers."""
    counts = collections.Counter(layer.mask for layer in layers)
    scores = {mask: patterns.induction_by_chance(mask.visible(2 * block), block) for mask in counts}
    return sum(scores[mask] * count for mask, count in counts.items()) / len(layers)


def _of_layer(
    layer: Layer, repeated: Layer, block: int, chosen_T: np.ndarray, others_B: np.ndarray
) -> tuple[Behaviour, np.ndarray]:
    """Returns a layer's behaviour without `weights_NN`, and [T, N, Hv] head outputs.

    Args:
      layer: the layer's attention on the texts.
      repeated: the layer's attention on repeated tokens.
      block: number of tokens that are repeated.
      chosen_T: indices of the tokens, over all sequences, whose outputs are returned.
      others_B: see `_rows`.
    """
    count = len(layer.query_BTNH)
    visible_TT = layer.mask.visible(layer.query_BTNH.shape[1])
    by_sequence = logits.parallel_map(lambda b: activations.attention(layer, b), range(count))
    p_BNTT, o_BTNH = map(list, zip(*by_sequence, strict=True))

    def sequence_statistics(b):
        p_NTT = p_BNTT[b]
        other = patterns.divergence(p_NTT, p_BNTT[others_B[b]], visible_TT) if count > 1 else None
        return (
            np.stack(patterns.statistics(p_NTT, visible_TT)),
            np.full(len(p_NTT), np.nan) if other is None else other,
            patterns.divergences(p_NTT, visible_TT),
            patterns.divergences(*patterns.without_first(p_NTT, visible_TT)),
        )

    means = [
        np.mean(x, axis=0)
        for x in zip(*logits.parallel_map(sequence_statistics, range(count)), strict=True)
    ]
    statistics_SN, content_N, divergence_NN, without_first_NN = means
    repeated_BNTT = [activations.attention(repeated, b)[0] for b in range(len(repeated.query_BTNH))]
    output_TNH = _tokens(np.stack(o_BTNH))[chosen_T]
    with few_threads(output_TNH.shape[2]):
        outputs_NN = cka.linear_cka(list(output_TNH.swapaxes(0, 1)))
    induction_BN = [patterns.induction(p_NTT, block) for p_NTT in repeated_BNTT]
    by_name = dict(zip(STATISTICS, statistics_SN, strict=True))
    map_tokens = slice(MAP_TOKENS)
    behaviour = Behaviour(
        num_kv_heads=layer.key_BTKH.shape[2],
        mask=layer.mask,
        statistics=by_name | dict(content_N=content_N, induction_N=np.mean(induction_BN, axis=0)),
        divergence_NN=divergence_NN,
        without_first_NN=without_first_NN,
        outputs_NN=outputs_NN,
        weights_NN=None,
        text_NTT=p_BNTT[0][:, map_tokens, map_tokens].astype(np.float32),
        repeated_NTT=repeated_BNTT[0].astype(np.float32),
    )
    return behaviour, output_TNH
