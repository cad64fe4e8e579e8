"""Computes the numbers that the report on logits shows."""

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from kvjax.analysis.measures import spectrum
from kvjax.analysis.measures.spread import Spread, spread
from kvjax.analysis.reports.logits.measurements import (
    AVERAGED_WEIGHTS,
    CAUSAL_LOGITS,
    LOGITS,
    LOGITS_WITHOUT_ROPE,
    WEIGHTS,
    WEIGHTS_AT_DISTANCES,
    Kind,
    LogitMeasurements,
)
from kvjax.analysis.request import Request, reference_length
from kvjax.foundation import json_text

SHARE = 0.9  # share of the energy that the counted components hold
COMPONENTS = (1, 2, 5, 10, 20, 40)  # numbers of components in the paper's table 1


class Results:
    """Results of one model."""

    def __init__(self, name: str, request: Request, measured: LogitMeasurements):
        self.name, self.texts, self.lengths = name, tuple(request.texts), tuple(request.lengths)
        self.measured = measured
        self.reference_length = reference_length(request.lengths)

    @property
    def num_heads(self) -> int:
        layers, _, heads, _ = self.measured.energies[WEIGHTS, 0].shape
        return layers * heads

    @property
    def is_causal(self) -> bool:
        return (CAUSAL_LOGITS, self.reference_length) in self.measured.energies

    def kinds(self) -> list[Kind]:
        """Returns the measured kinds: first weights, then logits, each in order of length."""
        order = (
            WEIGHTS,
            WEIGHTS_AT_DISTANCES,
            AVERAGED_WEIGHTS,
            LOGITS,
            CAUSAL_LOGITS,
            LOGITS_WITHOUT_ROPE,
        )
        return sorted(self.measured.energies, key=lambda kind: (order.index(kind[0]), kind[1]))

    def ranks(self, kind: Kind, share: float = SHARE) -> np.ndarray:
        """Returns [layers, texts, N] components that hold a share of the energy."""
        return spectrum.energy_rank(self.measured.energies[kind], share)

    def spread(self, kind: Kind, share: float = SHARE) -> Spread:
        """Returns the spread of `ranks`. For weights, `between_texts` is None."""
        ranks = spread(self.ranks(kind, share))
        is_logits = kind[0] in (LOGITS, CAUSAL_LOGITS, LOGITS_WITHOUT_ROPE)
        return ranks if is_logits else dataclasses.replace(ranks, between_texts=None)

    def curve(self, kind: Kind) -> np.ndarray:
        """Returns [layers, texts, N, H] shares of the energy that 1, 2, ... H components hold."""
        held = spectrum.cumulative(self.measured.energies[kind])[..., : self.measured.key_dim]
        missing = self.measured.key_dim - held.shape[-1]
        return np.pad(held, [(0, 0)] * 3 + [(0, missing)], mode="edge")

    def median(self, kind: Kind, share: float = SHARE) -> float:
        return float(np.median(self.ranks(kind, share)))

    def gap(self, kind: Kind) -> dict:
        """Returns the components of M without RoPE over those of E, for 90 % of the energy."""
        weights_L1N, logits_LBN = self.ranks((WEIGHTS, 0)), self.ranks(kind)
        head_ratios = (weights_L1N / np.maximum(logits_LBN, 1))[logits_LBN > 0]
        m_components, e_components = self.median((WEIGHTS, 0)), self.median(kind)
        by_text_B = np.median(logits_LBN, axis=(0, 2))
        return dict(
            matrix=kind[0],
            tokens=kind[1],
            of_m=m_components,
            of_e=e_components,
            ratio=m_components / e_components if e_components else None,
            of_heads=np.quantile(head_ratios, (0.25, 0.75)).tolist() if head_ratios.size else None,
            by_text={
                name: m_components / components if components else None
                for name, components in zip(self.texts, by_text_B.tolist(), strict=True)
            },
        )

    def gaps(self) -> list[dict]:
        """Returns the `gap` of every kind of E at every length."""
        kinds = [
            (name, length)
            for name in (LOGITS, CAUSAL_LOGITS, LOGITS_WITHOUT_ROPE)
            for length in self.lengths
        ]
        return [self.gap(kind) for kind in kinds if kind in self.measured.energies]

    def errors(self) -> list[dict]:
        """Returns the medians of errors and bound for every length, mask and rank."""

        def median(x):
            return np.nanmedian(x, axis=(0, 1, 2)).tolist()

        rows = []
        for (tokens, causal), errors in self.measured.errors.items():
            bounds = median(self.measured.bounds[tokens])
            of_ranks = zip(self.measured.ranks, median(errors), bounds, strict=True)
            for rank, (mean, worst, output), bound in of_ranks:
                about = dict(tokens=tokens, causal=causal, rank=rank)
                rows.append(about | dict(mean=mean, worst=worst, output=output, bound=bound))
        return rows

    def betas(self, length: int) -> np.ndarray:
        """Returns [layers, texts, N] betas, the largest delocalisation of each head."""
        return np.nan_to_num(self.measured.delocalisation[length]).max(axis=-1)

    def geometry(self) -> list[dict]:
        """Returns for every length beta, delocalisation of vectors and geometry of keys."""
        rows = []
        for length in self.lengths:
            spread_LBNR, beta_LBN = self.measured.delocalisation[length], self.betas(length)
            row = dict(tokens=length, beta=float(np.median(beta_LBN)))
            known = spread_LBNR[~np.isnan(spread_LBNR)]
            row["of_vectors"] = float(np.median(known)) if known.size else None
            row["beta_most"] = float(beta_LBN.max())
            keys = np.moveaxis(self.measured.keys[length], -1, 0)
            for name, x_LBK in zip(("incoherence", "condition"), keys, strict=True):
                row |= {
                    name: json_text.plain(np.nanmedian(x_LBK)),
                    f"{name}_most": json_text.plain(np.nanmax(x_LBK)),
                }
            rows.append(row)
        return rows

    def perplexities(self) -> Iterator[dict]:
        """Yields perplexities over all texts, by length and rank; rank None: unmodified model."""
        for (tokens, rank), perplexity_B in self.measured.perplexity.items():
            plain_B = self.measured.perplexity[tokens, 0]

            def mean(x_B):
                return math.exp(np.log(x_B).mean())

            yield dict(
                tokens=tokens,
                rank=rank or None,
                perplexity=mean(perplexity_B),
                times=mean(perplexity_B / plain_B),
                by_text=dict(zip(self.texts, perplexity_B.tolist(), strict=True)),
            )
