"""Layer kinds (RoPE, window, soft cap), and the patterns in which the kinds of layers repeat."""

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
        """Keyword arguments of `Attention`, whose `positions` already contain the RoPE angles."""
        keys = self._asdict()
        del keys["rope_base"]
        return keys


class Pattern(NamedTuple):
    """Kinds of consecutive layers: a unit, repeated `repeats` times."""

    unit: tuple[LayerKind, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.unit) * self.repeats


@functools.cache
def patterns(kinds: tuple[LayerKind, ...]) -> tuple[Pattern, ...]:
    """Splits layers into patterns, such that the compiled program contains the fewest layers.

    A program contains each layer of a unit once, however often the unit is repeated. For example,
    four times (5 local layers, 1 global layer) and then 2 local layers become ((5 local, 1 global),
    4) and ((1 local), 2): 7 layers in the program instead of 26. Among splits with equally many
    layers, the one with fewest patterns is returned. A training step of 48 small layers of two
    alternating kinds takes 5 s to trace and compile on a CPU; with one scan per layer it took 34 s.

    Found by dynamic programming, from the last layer to the first: the best split of the layers
    from `start` on is one pattern followed by the best split of the remaining layers.
    """
    count = len(kinds)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind_L = np.array([numbers[kind] for kind in kinds], int)
    # equal[size]: how many layers in a row, from `start`, equal the layer `size` places later.
    equal = np.zeros(count, int)
    # By `start`: the cost of the best split (layers in all units, number of patterns), and its
    # first pattern (layers in the unit, layers in the pattern).
    costs, firsts = [(0, 0)] * (count + 1), [(0, 0)] * count
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
    """Yields the patterns of the best split; for `firsts` see `patterns`."""
    start = 0
    while start < len(kinds):
        size, length = firsts[start]
        yield Pattern(kinds[start : start + size], length // size)
        start += length
