"""The report on where the papers contradict each other: can a fixed subspace hold a head's keys?"""

from kvjax.analysis.measures import heads as heads_lib, subspace_methods
from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Figure, Section, Text
from kvjax.analysis.reports.compression import measurements, tables
from kvjax.analysis.reports.compression.results import Results, Times
from kvjax.analysis.request import Request, check_texts, reference_length
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # tokens of which halves and eighths say something
_SMALL = 0.05  # more perplexity, that is called little
_FIRST, _SPREAD = "first tokens", "as many, spread"


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for keys that cannot be cut, and rows too short."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: subspaces of part of a text need at least "
            f"{_SHORTEST} tokens: give longer lengths"
        )
    for mechanism in dict.fromkeys(model.transformer.mechanisms):
        if getattr(mechanism, "position_channels", 0):
            raise UserError(
                f"position_channels = {mechanism.position_channels}: part of each key is its "
                "position's and is not cached, so that there is no rank to compare"
            )
        if getattr(mechanism, "alibi", False):
            raise UserError(
                "alibi = True: part of each key is its position, which is not cached, so that "
                "there is no rank to compare"
            )
        if mechanism.query_dim < 2:
            raise UserError("keys of one channel: there is nothing to leave out of them")
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Keys cut at equal rank by weights, by text and by context.

    SmolLM2-135M on two texts, rows of 256 tokens and drift over 1,024, takes 95 s on two cores and
    1.6 GB.

    Raises:
      UserError: a text shorter than the longest length; weights or activations that are not finite.
    """
    check(model, request)
    check_texts(model, request.texts, request.lengths)
    long_enough = [length for length in request.lengths if length >= _SHORTEST]
    length, longest = reference_length(long_enough), max(request.lengths)
    measured = measurements.measure(model, request.texts, length, longest)
    return _section(Results(model.name, request, measured))


def _section(found: Results) -> Section:
    return Section(
        name="compression",
        title="Where the papers contradict each other: fixed subspaces of keys",
        lead=_lead(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=tables.data(found),
    )


# -- in words --------------------------------------------------------------------------------------


def _lead(found: Results) -> str:
    of = found.measured
    said = [
        "Can a subspace that is chosen in advance hold a head's keys? Three papers seem to "
        f"contradict each other. On this model, with {of.ranks[found.half]} of {of.key_dim} "
        f"channels kept, up to {100 * _SMALL:g} % of perplexity called little, and a spectrum "
        "called flat (its rank not low) that needs more than half of its possible components for "
        "90 % of its energy; what lies on both sides of the line by 95 % is not told:",
        _of_interaction(found),
        _of_weights(found),
        _of_svd(found),
        _of_fixed(found),
    ]
    if len(found.places()) > 1:
        said.append(_of_rope(found))
    said.append(
        "The papers speak of different matrices: M and W_K are what weights could do with any "
        "input, keys and E what they do with text."
    )
    return " ".join([*said, *_reconciled(found)])


def _of_interaction(found: Results) -> str:
    """Logit spectra's premise."""
    name = measurements.SPECTRUM_INTERACTION
    return (
        "(1) Logit spectra (section 5): the flat spectrum of M = W_Q W_K^T rules out compressing "
        f"weights. M is {'' if _is_flat(found, name) else 'not '}flat: it needs "
        f"{_needs(found, name)}."
    )


def _of_weights(found: Results) -> str:
    name = measurements.SPECTRUM_WEIGHTS
    return (
        "(2) LRKV (section 4): a head's W_K has low intrinsic rank. "
        f"{'It does not hold' if _is_flat(found, name) else 'It holds'}: W_K needs "
        f"{_needs(found, name)}."
    )


def _is_flat(found: Results, matrix: str) -> bool:
    """Whether 90 % of the energy takes more than half of the components that there can be."""
    return found.spectrum(matrix).median > found.possible(matrix) / 2


def _needs(found: Results, matrix: str) -> str:
    """Components for 90 % of the energy."""
    possible, channels = found.possible(matrix), found.channels(matrix)
    fewer = f", which has {channels} channels and that rank by construction"
    return (
        f"{found.spectrum(matrix).median:g} of {possible} components for 90 % of its energy"
        f"{fewer if possible < channels else ''}"
    )


def _of_svd(found: Results) -> str:
    way = _svd(found)
    if way[0] == subspace_methods.JOINT:
        each = _more(found, (subspace_methods.WEIGHTS, found.at_weights))
        how = f"with one SVD for all heads, {each} with one for each"
        matrix = measurements.SPECTRUM_JOINT
    else:
        how = "with an SVD of each head, not the paper's one of all heads"
        matrix = measurements.SPECTRUM_WEIGHTS
    possible, channels = found.possible(matrix), found.channels(matrix)
    if 2 * possible <= channels:
        held = "That is so by construction here"
    else:
        over = found.times(way, found.half).is_over(_SMALL)
        held = _said(over, "That does not hold here", "That holds here")
    rank = (
        f" W_K has rank {possible} of {channels} channels by construction: a cache that holds what "
        "it is made of, as with LRKV, MLA and factored keys, does not keep so many in the first "
        "place."
    )
    return (
        "(3) Thin keys (table 5): half the rank of W_K by SVD costs GPT-2 2 %. "
        f"{held}: perplexity changes by {_more(found, way)} {how}."
        f"{rank if possible < channels else ''}"
    )


def _said(flag: bool | None, yes: str, no: str) -> str:
    """One of them; None: the interval is on both sides of the line."""
    return "Whether that holds cannot be told" if flag is None else yes if flag else no


def _svd(found: Results) -> subspace_methods.Method:
    """The weights' subspaces that come nearest to thin keys."""
    joint = (subspace_methods.JOINT, found.at_weights)
    return joint if joint in found.measured.errors else (subspace_methods.WEIGHTS, found.at_weights)


def _of_fixed(found: Results) -> str:
    """Logit spectra's conclusion: of one way against the other."""
    claim = "(4) Logit spectra: fixed projections cannot do what those of a context can. "
    fixed, context = _fixed(found), (subspace_methods.CONTEXT, found.at_weights)
    known = _more(found, context)
    if not _ran(found, fixed):
        return (
            f"{claim}There was no other text, or too little, to find a fixed one on; one that "
            f"knows the context costs {known}."
        )
    more = found.times(fixed, found.half, over=context)
    over = more.is_over(_SMALL)
    held = _said(over, "That holds", "That does not hold")
    neither = over is False and found.times(context, found.half).is_over(_SMALL)
    return (
        f"{claim}{held} of keys cut {found.at_weights}: a subspace found once, on text that is not "
        f"measured, costs {_more(found, fixed)}, one that knows the context {known}: "
        f"{_percent(more)} from the second to the first.{' Neither can.' if neither else ''}"
    )


def _fixed(found: Results) -> subspace_methods.Method:
    return subspace_methods.CALIBRATED, found.at_weights


def _of_rope(found: Results) -> str:
    names = {
        "a fixed one": subspace_methods.CALIBRATED,
        "one found on the first half of the text": subspace_methods.FIRST_HALF,
        "one that knows the context": subspace_methods.CONTEXT,
    }
    after = [
        f"{said} costs {_more(found, (name, subspace_methods.AFTER))}"
        for said, name in names.items()
        if _ran(found, (name, subspace_methods.AFTER))
    ]
    half = (subspace_methods.FIRST_HALF, subspace_methods.BEFORE)
    before = (
        f"; that of the first half before RoPE: {_more(found, half)}" if _ran(found, half) else ""
    )
    return (
        f"After RoPE, which turns directions by position and is where that paper's E is, "
        f"{', '.join(after)}{before}."
    )


def _reconciled(found: Results) -> list[str]:
    """Why they do not contradict each other, where the numbers say so."""

    def over(way):
        return _ran(found, way) and found.times(way, found.half).is_over(_SMALL)

    fixed, svd = _fixed(found), _svd(found)
    if not _ran(found, fixed) or over(fixed) is not False or over(svd) is None:
        return []
    if not over(svd):
        if not _is_flat(found, measurements.SPECTRUM_INTERACTION):
            return ["Weights alone give a subspace that text keeps to, and M is not flat here."]
        return [
            "A flat M rules nothing out here: weights alone give a subspace that text keeps to."
        ]
    said = "Weights alone do not tell which directions those are, text does"
    others = (subspace_methods.OTHERS, found.at_weights)
    if others not in found.measured.errors or found.half not in found.told(others):
        return [f"{said}; whether other texts tell the same is not measured."]

    def error(way):
        return found.error(way, found.half)["logit"].median

    return [
        f"{said}: the error of logits is {error(fixed):.3f} with a fixed one, and "
        f"{error(others):.3f} where that has seen nothing of the same text."
    ]


def _ran(found: Results, way: subspace_methods.Method) -> bool:
    """Whether the whole model ran so at half the channels."""
    return found.times(way, found.half) is not None


def _more(found: Results, way: subspace_methods.Method) -> str:
    return _percent(found.times(way, found.half))


def _percent(of: Times) -> str:
    """What of perplexity is added, with 95 % of it."""
    more, low, high = (100 * (x - 1) for x in (of.times, of.low, of.high))
    return f"{more:+.1f} % ({low:+.1f} to {high:+.1f})"


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    made = [_logits(found, where) for where in found.places()]
    made += [_perplexity(found, where) for where in found.places()]
    return [*made, _overlap(found), _later(found)]


def _names(found: Results, where: str) -> list[str]:
    """The ways of a place that lines are drawn of."""
    here = [name for name, at in found.ways() if at == where and found.told((name, at))]
    return [name for name in here if name != subspace_methods.WEIGHTS_MEAN]


def _cut_where(where: str) -> str:
    """What is cut, in a sentence."""
    return {
        subspace_methods.BEFORE: "Keys are cut before RoPE and turned as they are read",
        subspace_methods.AFTER: "Keys are cut after RoPE, as attention meets them",
        subspace_methods.ANYWHERE: "Keys are cut as attention meets them; the model has no RoPE",
    }[where]


def _logits(found: Results, where: str) -> Figure:
    ranks = found.measured.ranks
    series, bands, told = {}, {}, []
    for name in _names(found, where):
        at = found.told((name, where))
        spreads = [found.error((name, where), i)["logit"] for i in at]
        series[name] = ([ranks[i] for i in at], [one.median for one in spreads])
        if name in (subspace_methods.CALIBRATED, subspace_methods.CONTEXT):
            bands[name] = ([one.low for one in spreads], [one.high for one in spreads])
        told.append(_at_ranks(name, *series[name]))
    return Figure(
        f"Error of logits by rank, keys cut {where}",
        draw.lines(series, x="rank r", y="|E - E_r| / |E|", bands=bands),
        f"Medians, at ranks of {found.measured.key_dim}. {'; '.join(told)}.",
        Text(
            f"{_cut_where(where)}, r channels kept of each KV head: the relative error of "
            "centred logits over the keys that a query sees, medians over heads and rows, with "
            "bands for the middle half of two of the ways.",
            "0 is no loss, 1 is nothing left. Where fixed subspaces lie close to those of the "
            "context, which directions matter does not depend on the text. 'Of this context' "
            "knows the whole row and cannot be had as text comes in. It has the "
            f"{tables.LEAST}, not over those that are shown, so that another may be below it.",
            "Logit spectra, section 5: a fixed projection cannot do it; its E is after RoPE and "
            "cut by an SVD of each context.",
        ),
    )


def _at_ranks(name: str, ranks: list[float], values: list[float]) -> str:
    """A line in words."""
    at = ", ".join(f"{r:.3g}" for r in ranks)
    return f"{name} at {at}: " + ", ".join(f"{x:.3f}" for x in values)


def _perplexity(found: Results, where: str) -> Figure:
    ranks, H = found.measured.ranks, found.measured.key_dim
    series = {}
    for name in _names(found, where):
        at = found.runs((name, where))
        if at:
            times = [found.times((name, where), i).times for i in at]
            series[name] = ([ranks[i] for i in at], times)
    if where != subspace_methods.AFTER and H * tables.PUBLISHED_HEADS == tables.PUBLISHED_CHANNELS:
        published = zip(*tables.published_by_rank().values(), strict=True)
        series["GPT-2, SVD of all heads (thin keys)"] = tuple(map(list, published))
    told = [_at_ranks(name, *line) for name, line in series.items()]
    return Figure(
        f"Perplexity by rank, keys of all layers cut {where}",
        draw.lines(series, x="rank r", y="times the model's", log_y=True, level={"the model": 1.0}),
        f"Times the model's own, at ranks of {H}. {'; '.join(told)}.",
        Text(
            f"{_cut_where(where)}, in all layers at once: perplexity on the second half of rows "
            f"of {found.measured.length:,} tokens over the model's own. Nothing is tuned.",
            "1 is no loss. Subspaces are found on the model as it is, one layer not knowing what "
            "others lose; the table has how sure the numbers are.",
            "Thin keys, table 5: GPT-2 at half rank 1.020, at a quarter 1.257, with one SVD of "
            "W_K for all heads. Logit spectra leaves perplexity open.",
        ),
    )


def _overlap(found: Results) -> Figure:
    of, series, bands, told = found.measured, {}, {}, []
    for where in found.places():
        for said, spreads in zip((_FIRST, _SPREAD), found.overlaps(where), strict=True):
            _line(f"{where}, {said}", list(of.drift_at), spreads, series, bands, told)
        gaps = ", ".join(f"{gap.median:.2f}" for gap in found.drifts(where))
        told.append(f"{where}, the gap: {gaps}")
    at = ", ".join(f"{t:,}" for t in of.drift_at)
    random = of.drift_rank / of.key_dim
    return Figure(
        "How far the subspace of the first tokens stays",
        draw.lines(
            series, x="tokens", y="overlap", log_x=True, bands=bands, level={"random": random}
        ),
        f"Medians at {at} of {of.drift_length:,} tokens, two random ones have {random:.2f}. "
        f"{'; '.join(told)}.",
        Text(
            f"The mean squared cosine of the angles between the subspace of {of.drift_rank} of "
            f"{of.key_dim} channels for all tokens of a text and that for the first ones, or for "
            f"as many spread evenly over it; each has the {tables.LEAST}, of its tokens.",
            "1 is the same subspace. Few tokens tell a subspace badly also where nothing changes: "
            "that much is lost by spread ones, and the gap between the two lines is the drift. "
            "Directions that matter little count like those that matter much; the next figure "
            "weighs them.",
            "Logit spectra, section 5, says that the projection shifts as the context grows, and "
            "does not measure it.",
        ),
    )


def _line(
    name: str, at: list[int], spreads: list[Spread], series: dict, bands: dict, told: list[str]
) -> None:
    """Medians and quartiles of a line into what a figure draws and says."""
    series[name] = (at, [one.median for one in spreads])
    if name.endswith(_FIRST):
        bands[name] = ([one.low for one in spreads], [one.high for one in spreads])
    told.append(f"{name}: " + ", ".join(f"{one.median:.2f}" for one in spreads))


def _later(found: Results) -> Figure:
    of, series, bands, level, told = found.measured, {}, {}, {}, []
    at = [*of.drift_at, of.drift_length]
    for where in found.places():
        later = found.later(where)
        for said, some in ((_FIRST, later.first), (_SPREAD, later.spread)):
            _line(f"{where}, {said}", at, [*some, later.whole], series, bands, told)
        if later.fixed:
            level[f"fixed, {where}"] = later.fixed.median
            told.append(f"fixed, {where}: {later.fixed.median:.2f}")
    return Figure(
        "What the subspace of the first tokens makes of later logits",
        draw.lines(series, x="tokens", y="|E - E_r| / |E|", log_x=True, bands=bands, level=level),
        f"Medians at {', '.join(f'{t:,}' for t in at)} tokens. {'; '.join(told)}.",
        Text(
            f"The error of logits in the second half of {of.drift_length:,} tokens under the "
            f"subspace of rank {of.drift_rank} of the first tokens, and of as many spread evenly "
            "over the text, up to all of them; dashed: under a fixed one, from text that is not "
            "measured.",
            "The gap between the two lines is what a cache loses by drift that chose its subspace "
            "early and kept it; what spread tokens lose to the last point, few tokens of any text "
            f"do. {_dashed(found)}",
            "Not measured in any of the papers.",
        ),
    )


def _dashed(found: Results) -> str:
    """What the fixed subspace has seen."""
    if found.measured.later:
        return "The fixed one has seen later parts of the same texts, and of any others."
    return "The fixed one has seen the other texts only."
