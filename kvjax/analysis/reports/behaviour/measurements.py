"""Measurements of every head's attention on texts."""

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

WINDOWS = 2  # of each text, one behind the other
MAP_TOKENS = 64  # that maps show
_REPEATED_ROWS = 8
_CKA_TOKENS = 512
STATISTICS = patterns.Statistics._fields  # and "content_N", "induction_N"


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Attention patterns of one layer's heads, and distances between heads.

    Attributes:
      num_kv_heads: query head n reads KV head n // (N / K).
      statistics: [N] by name: means over sequences of `patterns.Statistics`; `content_N`, the
        divergence of a head's patterns between two sequences (of two texts if there are several;
        nan for a single sequence); and `induction_N`.
      divergence_NN, without_first_NN: divergences of patterns in nats, over all keys and over all
        but the first.
      outputs_NN: CKA of heads' outputs.
      weights_NN: similarity of the forms W_Q W_K^T (`diversity`); None if there are none, or one
        head.
      text_NTT, repeated_NTT: each head's patterns on the first tokens of the first sequence, and on
        a repeated one.
    """

    num_kv_heads: int
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
        """Returns one number per pair of heads.

        Args:
          shared: only pairs that do, or do not, share a KV head.
        """
        first, second = np.triu_indices(self.num_heads, 1)
        group_N = np.arange(self.num_heads) * self.num_kv_heads // self.num_heads
        alike = group_N[first] == group_N[second]
        return x_NN[first, second][slice(None) if shared is None else alike == shared]


@dataclasses.dataclass(frozen=True)
class BehaviourMeasurements:
    """Attention patterns of a model's heads by layer, and the measurement's parameters.

    Attributes:
      length, sequences: tokens per sequence, number of sequences.
      block: repeated tokens.
      mask: of attention.
      induction_by_chance: score of uniform attention.
      inputs_LL, outputs_LL: CKA between layers, of attention's inputs and of all heads' outputs.
    """

    layers: Sequence[Behaviour]
    length: int
    sequences: int
    block: int
    mask: Mask
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
    """Measures all layers, with one layer's patterns in memory.

    Raises:
      UserError: activations are not finite.
    """
    rows_BT, others_B = _rows(texts, length)
    c = model.transformer.block
    mask = Mask(c.causal, c.window)
    # The earlier occurrence must be within the window.
    block = min(MAP_TOKENS // 2, length // 2, *([c.window] if c.causal and c.window else []))
    tokens_A = np.unique(np.concatenate(list(texts.values())))
    if len(tokens_A) < block:
        tokens_A = np.arange(model.transformer.vocab_size)
    block = min(block, len(tokens_A))
    again_BT = patterns.repeated(tokens_A, block, _REPEATED_ROWS, seed)
    at_T = np.unique(np.linspace(0, rows_BT.size - 1, min(_CKA_TOKENS, rows_BT.size)).astype(int))
    found, inputs, outputs = [], [], []
    with progress.waiting("attention patterns") as doing:
        both = (activations.layers(model, rows_BT), activations.layers(model, again_BT))
        for i, (layer, again) in enumerate(zip(*both, strict=True)):
            doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
            one, output_TNH = _of_layer(layer, again, block, at_T, others_B)
            found.append(dataclasses.replace(one, weights_NN=_weights(model, i)))

            def flat(x):
                return x.reshape(len(at_T), -1).astype(np.float32)

            inputs.append(flat(_tokens(layer.input_BTD)[at_T]))
            outputs.append(flat(output_TNH))
        doing.now("similarity of layers")
        return BehaviourMeasurements(
            layers=found,
            length=length,
            sequences=len(rows_BT),
            block=block,
            mask=mask,
            induction_by_chance=patterns.induction_by_chance(mask.visible(2 * block), block),
            inputs_LL=cka.linear_cka(inputs),
            outputs_LL=cka.linear_cka(outputs),
        )


def _rows(texts: Mapping[str, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first windows [B, T] of each text, and for each the row to compare with.

    The comparison row is from the next text, or from the same one if there is only one text.
    """
    counts = [min(WINDOWS, len(tokens_T) // length) for tokens_T in texts.values()]
    rows = [
        tokens_T[: count * length].reshape(count, length)
        for tokens_T, count in zip(texts.values(), counts, strict=True)
    ]
    first = np.cumsum([0, *counts])
    others = [
        first[(text + 1) % len(counts)] + i % counts[(text + 1) % len(counts)]
        if len(counts) > 1
        else (i + 1) % count
        for text, count in enumerate(counts)
        for i in range(count)
    ]
    return np.concatenate(rows), np.array(others)


def _tokens(x_BTD: np.ndarray) -> np.ndarray:
    """Returns [B·T, ...] of all sequences."""
    return x_BTD.reshape(-1, *x_BTD.shape[2:])


def _weights(model: LazyModel, index: int) -> np.ndarray | None:
    """Returns [N, N] similarities of the forms of a layer's heads, or None."""
    try:
        with few_threads(model.transformer.block.d_model):
            return diversity.of_layer(heads_lib.of_layer(model, index)).similarity_NN
    except UserError:  # one head, or queries and keys that are not linear in the input
        return None


def _of_layer(
    layer: Layer, again: Layer, block: int, at_T: np.ndarray, others_B: np.ndarray
) -> tuple[Behaviour, np.ndarray]:
    """Returns a layer's behaviour without weights, and the [T, N, Hv] outputs of some tokens."""
    count = len(layer.query_BTNH)
    visible_TT = layer.mask.visible(layer.query_BTNH.shape[1])
    by_sequence = logits.parallel_map(lambda b: activations.attention(layer, b), range(count))
    p_BNTT, o_BTNH = map(list, zip(*by_sequence, strict=True))

    def of(b):
        p_NTT = p_BNTT[b]
        other = patterns.divergence(p_NTT, p_BNTT[others_B[b]], visible_TT) if count > 1 else None
        return (
            np.stack(patterns.statistics(p_NTT, visible_TT)),
            np.full(len(p_NTT), np.nan) if other is None else other,
            patterns.divergences(p_NTT, visible_TT),
            patterns.divergences(*patterns.without_first(p_NTT, visible_TT)),
        )

    means = [np.mean(x, axis=0) for x in zip(*logits.parallel_map(of, range(count)), strict=True)]
    statistics_SN, content_N, divergence_NN, without_first_NN = means
    repeated_BNTT = [activations.attention(again, b)[0] for b in range(len(again.query_BTNH))]
    output_TNH = _tokens(np.stack(o_BTNH))[at_T]
    with few_threads(output_TNH.shape[2]):
        outputs_NN = cka.linear_cka(list(output_TNH.swapaxes(0, 1)))
    induction_BN = [patterns.induction(p_NTT, block) for p_NTT in repeated_BNTT]
    named = dict(zip(STATISTICS, statistics_SN, strict=True))
    few = slice(MAP_TOKENS)
    behaviour = Behaviour(
        num_kv_heads=layer.key_BTKH.shape[2],
        statistics=named | dict(content_N=content_N, induction_N=np.mean(induction_BN, axis=0)),
        divergence_NN=divergence_NN,
        without_first_NN=without_first_NN,
        outputs_NN=outputs_NN,
        weights_NN=None,
        text_NTT=p_BNTT[0][:, few, few].astype(np.float32),
        repeated_NTT=repeated_BNTT[0].astype(np.float32),
    )
    return behaviour, output_TNH
