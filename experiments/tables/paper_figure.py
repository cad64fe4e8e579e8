"""A figure that a paper prints, the figure from our shapes, and their comparison."""

import dataclasses

import jax.numpy as jnp

from kvjax.costs import formulas
from kvjax.model.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Figure:
    """A paper's printed figure, and the figure from our shapes in the same unit."""

    what: str
    unit: str
    paper: str  # as printed; ours is compared at its decimals; "≤ x" and "x to y" are bounds
    ours: float
    why: str = ""  # printed if the figures differ
    note: str = ""  # always printed

    @property
    def agrees(self) -> bool:
        if self.paper.startswith("≤ "):
            return bool(self.ours <= float(self.paper[2:]))
        low, _, high = self.paper.partition(" to ")
        if high:
            return bool(float(low) <= round(self.ours) <= float(high))
        return self.rounded == self.paper

    @property
    def rounded(self) -> str:
        """Our figure with the paper's number of decimals; one more if the paper has a range."""
        decimals = len(self.paper.partition(".")[2]) + (" to " in self.paper)
        return f"{self.ours:,.{decimals}f}"

    @property
    def verdict(self) -> str:
        parts = [("agrees" if self.agrees else f"differs: {self.why}"), self.note]
        return "; ".join(filter(None, parts))


def cache_bytes(config: TransformerConfig) -> int:
    """Returns cache bytes per token, all layers, with 16 bits per element."""
    return formulas.cache_bytes_per_token(config, jnp.dtype(jnp.bfloat16))
