"""Kinds of layers of one shape (RoPE, window, soft cap), and the patterns in which they repeat."""

from collections.abc import Iterator
import functools
from typing import NamedTuple

import numpy as np

from kvjax.layers import rope


class LayerKind(NamedTuple):
    """RoPE, window and soft cap of a layer; keywords of `Attention.decode`."""

    rope_base: rope.Base | None  # None: no RoPE
    window: int = 0  # see `softmax_attention`; 0: no window
    logit_factor: float = 1.0  # factor on logits, besides the mechanism's
    softcap: float = 0.0  # see `softmax_attention`; 0: none

    @property
    def attend(self) -> dict:
        """Keywords of `Attention`, which takes angles as positions."""
        keys = self._asdict()
        del keys["rope_base"]
        return keys


class Pattern(NamedTuple):
    """Consecutive layers: the kinds of a unit, which is repeated."""

    unit: tuple[LayerKind, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.unit) * self.repeats


@functools.cache
def patterns(kinds: tuple[LayerKind, ...]) -> tuple[Pattern, ...]:
    """Splits layers into patterns whose units have fewest layers together; of these, into fewest.

    A program contains each layer of a unit once. 5 local layers and a global one, four times, and
    two more local layers are ((5 local, 1 global), 4) and ((1 local), 2): 7 layers instead of 26. A
    training step of 48 small layers, of two kinds in turn, is traced and compiled in 5 s of a CPU,
    as that of equal layers; with a scan per layer it took 34 s.

    Dynamic programming from the last layer on: the best split of the layers from `start` on is a
    pattern, whose number of repeats may be any, and the best split of the layers behind it.
    """
    count = len(kinds)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind_L = np.array([numbers[kind] for kind in kinds], int)
    # equal[size]: number of layers from `start` on that equal those `size` further on.
    equal = np.zeros(count, int)
    costs = [(0, 0)] * (count + 1)  # by start: layers of all units, number of patterns
    firsts = [(0, 0)] * count  # by start: layers of the first pattern's unit, and of the pattern
    for start in reversed(range(count)):
        rest = count - start
        equal[1:rest] = (equal[1:rest] + 1) * (kind_L[start + 1 :] == kind_L[start])
        cost, first = (rest, 1), (rest, rest)
        for size in range(1, rest):
            if size > cost[0]:
                break
            repeated = size * (1 + int(equal[size]) // size)
            ends = range(start + size, start + repeated + 1, size)
            end = count if count in ends else min(ends, key=costs.__getitem__)
            layers, number = costs[end]
            if (size + layers, number + 1) < cost:
                cost, first = (size + layers, number + 1), (size, end - start)
        costs[start], firsts[start] = cost, first
    return tuple(_split(kinds, firsts))


def _split(kinds: tuple[LayerKind, ...], firsts: list[tuple[int, int]]) -> Iterator[Pattern]:
    """Yields patterns; `firsts` has, by first layer, the layers of the unit and of the pattern."""
    start = 0
    while start < len(kinds):
        size, length = firsts[start]
        yield Pattern(kinds[start : start + size], length // size)
        start += length
