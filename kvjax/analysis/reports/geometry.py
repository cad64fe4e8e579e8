"""The report on LRKV's bases and residuals (arXiv 2601.11471, section 4 and figure 8), over layers
and, of a run that kept snapshots, over steps (its future work 4 and appendix C.11).
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import numpy as np

from kvjax.analysis import diversity
from kvjax.analysis import draw
from kvjax.analysis import geometry
from kvjax.analysis import heads as heads_lib
from kvjax.analysis import spectrum
from kvjax.analysis.geometry import Optimal
from kvjax.analysis.geometry import Split
from kvjax.analysis.reports.diversity import in_words
from kvjax.analysis.reports.diversity import mechanism_names
from kvjax.analysis.reports.diversity import stages
from kvjax.analysis.request import Request
from kvjax.analysis.section import Column
from kvjax.analysis.section import Figure
from kvjax.analysis.section import Section
from kvjax.analysis.section import Table
from kvjax.analysis.section import Text
from kvjax.convert.factors import few_threads
from kvjax.convert.model import Model

_PARTS = ("key", "value")
_LEADING = 3  # eigenvalues that are followed over steps


@dataclasses.dataclass(frozen=True)
class _Part:
    """The keys or the values of a layer; of a layer without residuals only its norms."""

    total_norm_K: np.ndarray
    rank: int = 0
    best_chance: float | None = None  # overlap of best residuals of unrelated heads
    raw: Split | None = None
    canonical: Split | None = None
    own: Optimal | None = None
    random: tuple[Split, Split, Optimal] | None = None  # raw, canonical and own of random factors
    beside: Optimal | None = None
    beside_norm_K: np.ndarray | None = None


_Layers = list[dict[str, _Part]]  # by part, of each layer


def section(model: Model, request: Request) -> Section:
    """Norms of keys and values; of mechanisms with residuals, their geometry.

    Raises:
      UserError: weights that are not finite or no matrices of heads (see `heads.read`).
    """
    layers = _measure(model, request.beside, request.seed)
    evolution = [(step, _moment(snapshot)) for step, snapshot in request.snapshots]
    apart = any(part.raw for layer in layers for part in layer.values())
    there = [name for name in _PARTS if any(name in layer for layer in layers)]
    beside = request.beside.name if request.beside else None
    figures = [_norm_figure(layers, name, beside) for name in there]
    if apart:
        figures += [_cosine_figure(layers), _overlap_figure(layers), _angle_figure(layers)]
        figures += [_optimal_figure(layers, name, beside) for name in there]
        figures += [_best_figure(layers, beside)]
    return Section(
        name="geometry",
        title="Bases and residuals",
        lead=_lead(model, request, layers, apart),
        figures=[*figures, *(_evolution_figures(evolution, apart) if evolution else [])],
        tables=[_table(layers, name, apart) for name in there],
        data=dict(
            mechanism=mechanism_names(model.transformer.mechanisms),
            beside=beside,
            layers=[{name: _plain(part) for name, part in layer.items()} for layer in layers],
            snapshots=[dict(step=step) | moment for step, moment in evolution],
        ),
    )


# -- what is measured ------------------------------------------------------------------------------


def _measure(model: Model, beside: Model | None = None, seed: int | None = None) -> _Layers:
    """Of every layer; without a seed random factors are left out."""
    found = []
    with few_threads(model.transformer.block.d_model):
        for index, config in enumerate(model.transformer.mechanisms):
            other = {}
            if beside is not None and index < len(beside.transformer.mechanisms):
                other = geometry.totals(beside, index)
            if geometry.has_residuals(config):
                parts = geometry.of_layer(model, index)
                seeds = None if seed is None else (seed, index)
                found.append({n: _of_parts(x, other.get(n), seeds) for n, x in parts.items()})
                continue
            whole = geometry.totals(model, index).items()
            found.append({n: _of_whole(x, other.get(n)) for n, x in whole})
    return found


def _of_whole(total_DKH: np.ndarray, other_DKH: np.ndarray | None) -> _Part:
    beside_norm_K = None if other_DKH is None else geometry.norms(other_DKH)
    return _Part(geometry.norms(total_DKH), beside_norm_K=beside_norm_K)


def _of_parts(parts: geometry.Parts, other_DKH: np.ndarray | None, seed) -> _Part:
    D = len(parts.residual_DKH)
    raw, canonical, own = _both_gauges(parts)
    beside = None
    if other_DKH is not None and other_DKH.shape == parts.residual_DKH.shape:
        bases = parts.base_DJH.shape[1]
        heads = geometry.in_canonical_gauge(other_DKH, bases, parts.rank)
        beside = geometry.optimal(heads, geometry.split(heads), raw)
    random = None
    if seed is not None:
        *both, best = _both_gauges(geometry.random_like(parts, seed))
        random = (*map(_without_directions, both), best)
    return _Part(
        geometry.norms(parts.total_DKH),
        rank=parts.rank,
        best_chance=min(parts.rank, D) / D,
        raw=_without_directions(raw),
        canonical=_without_directions(canonical),
        own=own,
        random=random,
        beside=beside,
        beside_norm_K=None if other_DKH is None else geometry.norms(other_DKH),
    )


def _without_directions(split: Split) -> Split:
    """Its numbers alone: the directions of all layers would be gigabytes."""
    return split._replace(reads=())


def _both_gauges(parts: geometry.Parts) -> tuple[Split, Split, Optimal]:
    """As learned, in the canonical gauge, and what the best residuals do for the same heads."""
    raw, heads = geometry.split(parts), parts.canonical()
    canonical = geometry.split(heads)
    return raw, canonical, geometry.optimal(heads, canonical, raw)


def _moment(model: Model) -> dict:
    """A snapshot in numbers: means over layers and heads, and the spectra of every layer."""
    layers = _measure(model)
    found = {}
    for name in _PARTS:
        for measure, pick in _FOLLOWED.items():
            means = [_mean(pick(layer[name])) for layer in layers if name in layer]
            found[f"{name}_{measure}"] = _mean([x for x in means if x is not None])
    spectra = []
    if all(config.num_heads > 1 for config in model.transformer.mechanisms):
        with few_threads(model.transformer.block.d_model):
            spectra = [diversity.of_layer(heads) for heads in heads_lib.layers(model)]
    for measure in ("share", "centred_share", "centred_share_of_possible"):
        found[measure] = _mean([getattr(one, measure) for one in spectra])
    for measure in ("uncentred", "centred"):
        found[measure] = [getattr(one, f"{measure}_N").tolist() for one in spectra]
    return found


_FOLLOWED: dict[str, Callable[[_Part], np.ndarray | None]] = {
    "total_norm": lambda part: part.total_norm_K,
    "base_norm": lambda part: part.raw and part.raw.base_norm_J,
    "residual_norm": lambda part: part.raw and part.raw.residual_norm_K,
    "cosine": lambda part: part.raw and part.raw.cosine_K,
    "overlap": lambda part: part.raw and part.raw.overlap_K,
    "canonical_base_norm": lambda part: part.canonical and part.canonical.base_norm_J,
    "canonical_residual_norm": lambda part: part.canonical and part.canonical.residual_norm_K,
    "canonical_cosine": lambda part: part.canonical and part.canonical.cosine_K,
    "canonical_overlap": lambda part: part.canonical and part.canonical.overlap_K,
    "lost_alone": lambda part: part.own and part.own.alone_K,
    "lost_with_mean": lambda part: part.own and part.own.with_mean_K,
    "best_overlap": lambda part: part.own and part.own.overlap_K,
    "random_overlap": lambda part: part.random and part.random[0].overlap_K,
    "random_canonical_overlap": lambda part: part.random and part.random[1].overlap_K,
    "random_lost_alone": lambda part: part.random and part.random[2].alone_K,
    "random_lost_with_mean": lambda part: part.random and part.random[2].with_mean_K,
    "random_best_overlap": lambda part: part.random and part.random[2].overlap_K,
    "beside_norm": lambda part: part.beside_norm_K,
    "beside_lost_alone": lambda part: part.beside and part.beside.alone_K,
    "beside_lost_with_mean": lambda part: part.beside and part.beside.with_mean_K,
    "beside_best_overlap": lambda part: part.beside and part.beside.overlap_K,
}


def _plain(part: _Part) -> dict:
    """Every number of a part of a layer, by head."""
    numbers = {name: _numbers(pick(part)) for name, pick in _FOLLOWED.items()}
    angles = {
        name: [_numbers(each) for each in split.angles] if split else None
        for name, split in dict(angles=part.raw, canonical_angles=part.canonical).items()
    }
    chance = dict(beside_best_overlap_by_chance=part.best_chance)
    return dict(rank=part.rank) | chance | numbers | angles


def _numbers(values: Sequence[float] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(x) if np.isfinite(x) else None for x in values]


def _there(values: Sequence[float] | None) -> np.ndarray:
    found = np.asarray([] if values is None else values, np.float64)
    return found[np.isfinite(found)]


def _mean(values: Sequence[float] | None) -> float | None:
    there = _there(values)
    return float(there.mean()) if there.size else None


# -- figures ---------------------------------------------------------------------------------------


def _drawn(
    layers: _Layers,
    wanted: Mapping[str, tuple[str, str]],
    *,
    y: str,
    scale: float = 1.0,
    level: Mapping[str, float] | None = None,
    digits: str = ".2f",
) -> tuple[str, str]:
    """Curves over layers, with a band from the lowest head to the highest; and in words.

    Args:
      wanted: by the series' name, the part and what of it (see `_FOLLOWED`).
    """
    series, bands, words = {}, {}, []
    for label, (name, measure) in wanted.items():
        pick = _FOLLOWED[measure]
        found = [
            (i, _there(pick(layer[name])) * scale)
            for i, layer in enumerate(layers)
            if name in layer
        ]
        found = [(i, x) for i, x in found if x.size]
        if not found:
            continue
        series[label] = ([i for i, _ in found], [float(x.mean()) for _, x in found])
        bands[label] = ([float(x.min()) for _, x in found], [float(x.max()) for _, x in found])
        by_layer = [None] * len(layers)
        for i, x in found:
            by_layer[i] = float(x.mean())
        words.append(f"{label}: {in_words(by_layer, digits=digits)}")
    return draw.lines(series, x="layer", y=y, bands=bands, level=level), "; ".join(
        words or ["no residuals"]
    ) + "."


def _norm_figure(layers: _Layers, name: str, beside: str | None) -> Figure:
    measures = {
        "whole": "total_norm",
        "base": "base_norm",
        "residual": "residual_norm",
        "base, canonical": "canonical_base_norm",
        "residual, canonical": "canonical_residual_norm",
    } | ({f"whole, {beside}": "beside_norm"} if beside else {})
    wanted = {label: (name, measure) for label, measure in measures.items()}
    svg, words = _drawn(layers, wanted, y="Frobenius norm of a head")
    return Figure(
        f"Norms of {name} projections",
        svg,
        f"Norms by layer, means over heads. {words}",
        Text(
            f"Frobenius norms of each head's {name} projection by layer, and of base and residual "
            "where it has them; bands go from the lowest head to the highest.",
            "Base and residual are drawn as they were learned and in the canonical gauge, where "
            "the base is the mean of its heads; the whole is the same in both. Norms of keys "
            "have no effect where keys are normed.",
            "LRKV figure 8: base and residual each exceed the norm of MHA; whole keys at rank 64 "
            "are 4.2 (128M) and 5.1 times (2.5B) as large by its caption, 6.7 and 4.8 times by "
            "section 6.3.",
        ),
    )


def _cosine_figure(layers: _Layers) -> Figure:
    wanted = {f"{name}s": (name, "cosine") for name in _PARTS}
    wanted |= {f"{name}s, canonical": (name, "canonical_cosine") for name in _PARTS}
    svg, words = _drawn(layers, wanted, y="cosine", digits="z.3f")
    return Figure(
        "Cosine of base and residual",
        svg,
        f"Cosines by layer, means over heads. {words}",
        Text(
            "The cosine of each head's residual and its base, each taken as one long vector; bands "
            "go from the lowest head to the highest.",
            "Near 0, residuals add what the base does not have; below 0, they take some of it "
            "back. In the canonical gauge residuals sum to zero over heads, so their mean is "
            "about 0 whatever was learned, and only its band says something.",
            "LRKV section 6.3 speaks of moderate orthogonality and gives no number.",
        ),
    )


def _overlap_figure(layers: _Layers) -> Figure:
    wanted = {f"{name}s": (name, "overlap") for name in _PARTS}
    wanted |= {f"{name}s, canonical": (name, "canonical_overlap") for name in _PARTS}
    wanted["random factors"] = ("key", "random_overlap")
    wanted["random factors, canonical"] = ("key", "random_canonical_overlap")
    svg, words = _drawn(layers, wanted, y="mean squared cosine", digits=".3f")
    return Figure(
        "Input directions that base and residual share",
        svg,
        f"Mean squared cosines of principal angles by layer, means over heads. {words}",
        Text(
            "How much of what a residual reads of the layer's input lies in what its base reads: "
            "the mean squared cosine of the principal angles between their column spaces, in the "
            "canonical gauge between the base's and the R strongest of the residual's.",
            "1: the residual reads directions that the base reads too; 0: all of them are others. "
            "Random factors are of keys of the same norms: H/D, and more in the canonical gauge, "
            "where the mean has a part of every residual. Compare like with like.",
            "LRKV section 4 names such angles as a diagnostic of low overlap and gives no number.",
        ),
    )


def _angle_figure(layers: _Layers) -> Figure:
    series, words = {}, []
    for label, index in stages(len(layers)).items():
        part = layers[index].get("key")
        for gauge, split in (("", part.raw), (", canonical", part.canonical)):
            angles = [each for each in split.angles if each.size] if split else []
            if not angles:
                continue
            few = min(map(len, angles))
            ys = np.mean([each[:few] for each in angles], axis=0).tolist()
            series[label + gauge] = (list(range(1, few + 1)), ys)
            words.append(f"{label + gauge}: first {ys[0]:.2f}, last {ys[-1]:.2f}")
    return Figure(
        "Principal angles between base and residual of keys",
        draw.lines(series, x="principal angle", y="cosine"),
        f"Cosines of the first and last angle, means over heads. {'; '.join(words)}.",
        Text(
            "Cosines of the principal angles between the column spaces of a head's base and "
            "residual, one after the other, means over heads.",
            "1 is a direction that both read, 0 one that the base does not read.",
            "LRKV section 6.3 measures overlap so and shows no figure.",
        ),
    )


def _optimal_figure(layers: _Layers, name: str, beside: str | None) -> Figure:
    own = {"no base": "lost_alone", "the mean as base": "lost_with_mean"}
    measures = own | {f"random factors, {label}": f"random_{m}" for label, m in own.items()}
    if beside:
        measures |= {f"{beside}, {label}": f"beside_{m}" for label, m in own.items()}
    wanted = {label: (name, measure) for label, measure in measures.items()}
    svg, words = _drawn(layers, wanted, y="% of the energy lost", scale=100, digits=".1f")
    return Figure(
        f"What the best residuals of the same rank lose of {name}s",
        svg,
        f"Percent of the squared norm by layer, means over heads. {words}",
        Text(
            f"The share of each head's {name} projection that is lost if it is replaced by the "
            "best matrix of the residuals' rank R (a truncated SVD), alone or beside the mean of "
            "the heads; bands go from the lowest head to the highest.",
            "Learned base and residual lose nothing of their own heads. Where the mean with the "
            "best residuals loses little, the learned base is close to the mean but for what R "
            "directions hold; where it loses much, training found another split. Random factors "
            "have the norms of the learned ones. Curves of another model say how well its heads "
            "fit the form.",
            "LRKV section 6.3 announces a comparison with the truncated SVD of MHA and shows none.",
        ),
    )


def _best_figure(layers: _Layers, beside: str | None) -> Figure:
    wanted = {f"{name}s": (name, "best_overlap") for name in _PARTS}
    wanted["random factors"] = ("key", "random_best_overlap")
    chances, level = set(), {}
    if beside:
        wanted |= {f"{name}s, {beside}": (name, "beside_best_overlap") for name in _PARTS}
        chances = {part.best_chance for layer in layers for part in layer.values() if part.beside}
    if len(chances) == 1:
        level = {f"{beside}, by chance": chances.pop()}
    svg, words = _drawn(layers, wanted, y="mean squared cosine", level=level, digits=".3f")
    return Figure(
        "Learned residuals beside the best of their rank",
        svg,
        f"Mean squared cosines by layer, means over heads. {words}",
        Text(
            "How much of the input directions that a learned residual reads lies in those of the "
            "best residual of rank R about the mean of the heads.",
            "1: both read the same directions. They are of the same heads, so random factors come "
            "close to each other too. Against the best residuals of another model, where chance "
            "gives R/D, it means something only if one was made from the other or both started "
            "from the same weights: else no head belongs to a head.",
            "Not in the paper as a number.",
        ),
    )


def _evolution_figures(evolution: list[tuple[int, dict]], apart: bool) -> list[Figure]:
    steps = [step for step, _ in evolution]

    def over_steps(wanted: Mapping[str, str], y: str, **how) -> tuple[str, str]:
        curves = {label: [moment[key] for _, moment in evolution] for label, key in wanted.items()}
        there = {k: ys for k, ys in curves.items() if any(x is not None for x in ys)}
        shown = lambda x: "none" if x is None else f"{x:.3g}"
        words = "; ".join(f"{k}: {shown(ys[0])} to {shown(ys[-1])}" for k, ys in there.items())
        series = {label: (steps, ys) for label, ys in there.items()}
        span = f"From step {steps[0]} to {steps[-1]}, means over layers. {words}."
        return draw.lines(series, x="step", y=y, **how), span

    each = lambda *measures: {
        f"{name}s, {measure.replace('_', ' ')}": f"{name}_{measure}"
        for name in _PARTS
        for measure in measures
    }
    norms = ("total_norm", *(("base_norm", "residual_norm") if apart else ()))
    found = [
        Figure(
            "Norms over training",
            *over_steps(each(*norms), "Frobenius norm of a head"),
            Text(
                "Norms of keys and values, of the whole and of their parts, at every snapshot.",
                "Parts that grow at one pace keep their roles; a crossing is a change of roles.",
                "LRKV names this as future work 4.",
            ),
        )
    ]
    if apart:
        found.append(
            Figure(
                "Base and residual over training",
                *over_steps(each("cosine", "overlap", "canonical_overlap"), "cosine or its square"),
                Text(
                    "Cosine of base and residual, and the share of the residual's input directions "
                    "that lies in the base's, as learned and in the canonical gauge.",
                    "Curves that fall show residuals that move away from what the base has.",
                    "LRKV names this as future work 4.",
                ),
            )
        )
    if any(moment["centred"] for _, moment in evolution):
        leading = {}
        for i in range(_LEADING):
            for kind in ("uncentred", "centred"):
                shares = [spectrum.fractions(moment[kind])[:, i : i + 1] for _, moment in evolution]
                means = [float(x.mean()) if x.size else None for x in shares]
                leading[f"{kind} {i + 1}"] = (steps, means)
        ends = "; ".join(
            f"{k}: {ys[0]:.3f} to {ys[-1]:.3f}" for k, (_, ys) in leading.items() if None not in ys
        )
        ranks = {
            "not centred, share of N": "share",
            "centred, share of N - 1": "centred_share_of_possible",
        }
        found += [
            Figure(
                "Effective rank of heads over training",
                *over_steps(ranks, "share of heads"),
                Text(
                    "How many directions the heads' forms fill, at every snapshot.",
                    "See the report on diversity; random weights begin near 1.",
                    "LRKV analyses final checkpoints only and names this as an extension (C.11).",
                ),
            ),
            Figure(
                "Leading eigenvalues over training",
                draw.lines(leading, x="step", y="share of the sum"),
                f"From step {steps[0]} to {steps[-1]}, means over layers. {ends}.",
                Text(
                    f"The {_LEADING} largest eigenvalues of the heads' similarity, over their sum.",
                    "A first value that grows is a form that heads come to have in common; after "
                    "centring, a way in which most of them come to differ.",
                    "LRKV names this as an extension (C.11).",
                ),
            ),
        ]
    return found


# -- table and words -------------------------------------------------------------------------------


def _table(layers: _Layers, name: str, apart: bool) -> Table:
    shown = {"total_norm": ("norm", ".2f")}
    if any(name in layer and layer[name].beside_norm_K is not None for layer in layers):
        shown |= {"beside_norm": ("norm, beside", ".2f")}
    if apart:
        shown |= {
            "base_norm": ("base", ".2f"),
            "residual_norm": ("residual", ".2f"),
            "canonical_base_norm": ("base, canonical", ".2f"),
            "canonical_residual_norm": ("residual, canonical", ".2f"),
            "cosine": ("cosine", "z.3f"),
            "canonical_cosine": ("cosine, canonical", "z.3f"),
            "overlap": ("overlap", ".3f"),
            "canonical_overlap": ("overlap, canonical", ".3f"),
            "lost_alone": ("lost without base", ".3f"),
            "lost_with_mean": ("lost with the mean", ".3f"),
            "best_overlap": ("overlap with the best", ".3f"),
        }
    spread = {"total_norm", "residual_norm", "cosine", "canonical_cosine"} & set(shown)
    columns, rows = [Column("layer", "d"), *([Column("rank", "d")] if apart else [])], []
    for measure, (title, digits) in shown.items():
        columns.append(Column(title, digits))
        if measure in spread:
            columns.append(Column(f"{title}, ± over heads", digits))
    for index, layer in enumerate(layers):
        part = layer.get(name)
        if part is None:
            continue
        row = [index, *([part.rank] if apart else [])]
        for measure in shown:
            values = _there(_FOLLOWED[measure](part))
            row.append(_mean(values))
            if measure in spread:
                row.append(float(values.std()) if values.size else None)
        rows.append(row)
    return Table(
        f"{name.capitalize()} projections by layer",
        columns,
        rows,
        Text(
            "Means over heads of the numbers in the figures, and standard deviations over heads.",
            "Norms are Frobenius norms of a head's D x H matrix; overlaps are mean squared cosines "
            "of principal angles; losses are shares of the squared norm.",
        ),
    )


def _lead(model: Model, request: Request, layers: _Layers, apart: bool) -> str:
    mechanisms = mechanism_names(model.transformer.mechanisms)
    if apart:
        mean = lambda measure: _mean(
            np.concatenate([_there(_FOLLOWED[measure](layer["key"])) for layer in layers])
        )
        found = {measure: mean(measure) for measure in ("base_norm", "residual_norm", "overlap")}
        shown = {name: "none" if x is None else f"{x:.3g}" for name, x in found.items()}
        said = [
            f"Each head of {model.name} ({mechanisms}) has a shared base and a residual of low "
            "rank. Where one ends is a convention, so both are shown as learned and with the mean "
            f"of the heads as the base. Of keys, as learned, the mean norm is {shown['base_norm']} "
            f"(base) and {shown['residual_norm']} (residual), and {shown['overlap']} of what "
            "residuals read lies in what the base reads."
        ]
        if any(getattr(c, "splits_rope", False) for c in model.transformer.mechanisms):
            said.append(
                "RoPE turns the base alone here, so that moving a common part between both is "
                "another model: the canonical gauge describes sums of weights only."
            )
    else:
        said = [
            f"{model.name} ({mechanisms}) has no residuals beside a shared base, so there is "
            "nothing to take apart: what follows are the norms of its whole keys and values."
        ]
    compared = any(part.beside for layer in layers for part in layer.values())
    if request.beside is not None and apart and not compared:
        said.append(
            f"{request.beside.name} has other numbers of channels or KV heads: only norms are "
            "compared with it."
        )
    if not request.snapshots:
        said.append("There are no snapshots of its training, so nothing is shown over steps.")
    return " ".join(said)
