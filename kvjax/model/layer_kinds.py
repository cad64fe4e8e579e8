"""Kinds of layers of one shape (RoPE, window, soft cap), and the patterns in which they repeat."""

import functools
from typing import NamedTuple

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
    """Splits layers into patterns whose units have few layers together, and few patterns.

    A unit is repeated as often as it can be. A program contains each layer of a unit once. 5 local
    layers and a global one, four times, and two more local layers are ((5 local, 1 global), 4) and
    ((1 local), 2): 7 layers instead of 26. A training step of 48 small layers, of two kinds in
    turn, is traced and compiled in 5 s of a CPU, as that of equal layers; with a scan per layer it
    took 34 s.
    """
    if not kinds:
        return ()
    best = None
    for size in range(1, len(kinds) + 1):
        unit, repeats = kinds[:size], 1
        while kinds[repeats * size : (repeats + 1) * size] == unit:
            repeats += 1
        found = (Pattern(unit, repeats), *patterns(kinds[repeats * size :]))
        if best is None or _size(found) < _size(best):
            best = found
    return best


def _size(found: tuple[Pattern, ...]) -> tuple[int, int]:
    """Returns the number of layers of all units, and of patterns."""
    return sum(len(pattern.unit) for pattern in found), len(found)
