"""The report on where the papers contradict each other: can a fixed subspace hold a head's keys?"""

from kvjax.analysis import draw
from kvjax.analysis import heads as heads_lib
from kvjax.analysis import key_measurements
from kvjax.analysis import key_tables
from kvjax.analysis import key_ways
from kvjax.analysis import logit_measurements
from kvjax.analysis.key_results import Results
from kvjax.analysis.logit_results import reference_length
from kvjax.analysis.request import Request
from kvjax.analysis.section import Figure
from kvjax.analysis.section import Section
from kvjax.analysis.section import Text
from kvjax.convert.model import Model
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # tokens of which halves and eighths say something
_SMALL = 0.05  # more perplexity, that is called little


def check(model: Model, request: Request) -> None:
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
        if mechanism.query_dim < 2:
            raise UserError("keys of one channel: there is nothing to leave out of them")
        heads_lib.of_layer(model, model.transformer.mechanisms.index(mechanism))


def section(model: Model, request: Request) -> Section:
    """Keys cut at equal rank by weights, by text and by context.

    SmolLM2-135M on two texts, rows of 256 tokens and drift over 1,024, takes about 85 s of one
    core, divided by as many as there are, and 1.3 GB.

    Raises:
      UserError: a text shorter than the longest length; weights or activations that are not finite.
    """
    check(model, request)
    logit_measurements.check(model, request.texts, request.lengths)
    long_enough = [length for length in request.lengths if length >= _SHORTEST]
    length, longest = reference_length(long_enough), max(request.lengths)
    measured = key_measurements.measure(model, request.texts, length, longest)
    return _section(Results(model.name, request, measured))


def _section(found: Results) -> Section:
    return Section(
        name="compression",
        title="Where the papers contradict each other: fixed subspaces of keys",
        lead=_lead(found),
        figures=_figures(found),
        tables=key_tables.tables(found),
        data=key_tables.data(found),
    )


# -- in words --------------------------------------------------------------------------------------


def _lead(found: Results) -> str:
    of = found.measured
    said = [
        "Can a subspace that is chosen in advance hold a head's keys? Three papers seem to "
        f"contradict each other. On this model, with {of.ranks[found.half]} of {of.key_dim} "
        f"channels kept and up to {100 * _SMALL:g} % of perplexity called little:",
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
    said, flat = _needs(found, key_measurements.SPECTRUM_INTERACTION)
    return (
        "(1) Logit spectra (section 5): the flat spectrum of M = W_Q W_K^T rules out compressing "
        f"weights. M is {'' if flat else 'not '}flat: it needs {said}."
    )


def _of_weights(found: Results) -> str:
    said, flat = _needs(found, key_measurements.SPECTRUM_WEIGHTS)
    return (
        "(2) LRKV (section 4): a head's W_K has low intrinsic rank. "
        f"{'It does not hold' if flat else 'It holds'}: W_K needs {said}."
    )


def _needs(found: Results, matrix: str) -> tuple[str, bool]:
    """Components for 90 % of the energy, and whether that is more than half of them."""
    needs, dim = found.spectrum(matrix).median, found.channels(matrix)
    return f"{needs:g} of {dim} components for 90 % of its energy", needs > dim / 2


def _of_svd(found: Results) -> str:
    way = _svd(found)
    alone = ""
    if way[0] == key_ways.JOINT:
        each = _more(found, (key_ways.WEIGHTS, found.at_weights))
        alone = f" with one SVD for all heads, {each} with one for each"
    holds = "holds" if _is_little(found, way) else "does not hold"
    return (
        "(3) Thin keys (table 5): half the rank of W_K by SVD costs GPT-2 2 %. That "
        f"{holds} here: perplexity changes by {_more(found, way)}{alone}."
    )


def _svd(found: Results) -> key_ways.Way:
    """The weights' subspaces that come nearest to thin keys."""
    joint = (key_ways.JOINT, found.at_weights)
    return joint if joint in found.measured.errors else (key_ways.WEIGHTS, found.at_weights)


def _of_fixed(found: Results) -> str:
    """Logit spectra's conclusion."""
    where = found.at_weights
    fixed, context = ((name, where) for name in (key_ways.CALIBRATED, key_ways.CONTEXT))
    if fixed not in found.measured.errors:
        known = _more(found, context)
        return (
            "(4) Logit spectra: fixed projections cannot do what those of a context can. There was "
            f"no other text to find a fixed one on; one that knows the context costs {known}."
        )
    holds = "does not hold" if _is_little(found, fixed) else "holds"
    return (
        "(4) Logit spectra: fixed projections cannot do what those of a context can. That "
        f"{holds} of keys cut {where}: a subspace found once, on text that is not measured, costs "
        f"{_more(found, fixed)}, one that knows the context {_more(found, context)}."
    )


def _of_rope(found: Results) -> str:
    names = {
        "a fixed one": key_ways.CALIBRATED,
        "one found on the first half of the text": key_ways.FIRST_HALF,
        "one that knows the context": key_ways.CONTEXT,
    }
    behind = [
        f"{said} costs {_more(found, (name, key_ways.BEHIND))}"
        for said, name in names.items()
        if (name, key_ways.BEHIND) in found.measured.errors
    ]
    before = _more(found, (key_ways.FIRST_HALF, key_ways.BEFORE))
    return (
        f"Behind RoPE, where that paper's E stands and positions turn directions, "
        f"{', '.join(behind)}; that of the first half before RoPE: {before}."
    )


def _reconciled(found: Results) -> list[str]:
    """Why they do not contradict each other, where the numbers say so."""
    fixed = (key_ways.CALIBRATED, found.at_weights)
    if fixed not in found.measured.errors or not _is_little(found, fixed):
        return []
    if _is_little(found, _svd(found)):
        return [
            "A flat M rules nothing out here: weights alone give a subspace that text keeps to."
        ]
    return [
        "Weights alone do not tell which directions those are, text does, and they are much the "
        "same for these texts."
    ]


def _is_little(found: Results, way: key_ways.Way) -> bool:
    return found.times(way, found.half).times - 1 <= _SMALL


def _more(found: Results, way: key_ways.Way) -> str:
    """What of perplexity is added, with 95 % of it."""
    of = found.times(way, found.half)
    more, low, high = (100 * (x - 1) for x in (of.times, of.low, of.high))
    return f"{more:+.1f} % ({low:+.1f} to {high:+.1f})"


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    made = [_logits(found, where) for where in found.places()]
    made += [_perplexity(found, where) for where in found.places()]
    return [*made, _overlap(found), _later(found)]


def _names(found: Results, where: str) -> list[str]:
    """The ways of a place that lines are drawn of."""
    return [name for name, at in found.ways() if at == where and name != key_ways.WEIGHTS_MEAN]


def _cut_where(where: str) -> str:
    """What is cut, in a sentence."""
    return {
        key_ways.BEFORE: "Keys are cut before RoPE and turned as they are read",
        key_ways.BEHIND: "Keys are cut behind RoPE, as attention meets them",
        key_ways.ANYWHERE: "Keys are cut as attention meets them; the model has no RoPE",
    }[where]


def _logits(found: Results, where: str) -> Figure:
    ranks = list(found.measured.ranks)
    series, bands, told = {}, {}, []
    for name in _names(found, where):
        spreads = [found.error((name, where), i)["logit"] for i in range(len(ranks))]
        series[name] = (ranks, [one.median for one in spreads])
        if name in (key_ways.CALIBRATED, key_ways.CONTEXT):
            bands[name] = ([one.low for one in spreads], [one.high for one in spreads])
        told.append(f"{name}: " + ", ".join(f"{one.median:.3f}" for one in spreads))
    at = ", ".join(map(str, ranks))
    return Figure(
        f"Error of logits by rank, keys cut {where}",
        draw.lines(series, x="rank r", y="|E - E_r| / |E|", bands=bands),
        f"Medians at ranks {at} of {found.measured.key_dim}. {'; '.join(told)}.",
        Text(
            f"{_cut_where(where)}, r channels kept of each KV head: the relative error of "
            "centred logits over the keys that a query sees, medians over heads and rows, with "
            "bands for the middle half of two of the ways.",
            "0 is no loss, 1 is nothing left. Where fixed subspaces lie close to those of the "
            "context, which directions matter does not depend on the text. 'Of this context' "
            "knows the whole row and cannot be had as text comes in.",
            "Logit spectra, section 5: a fixed projection cannot do it; its E is behind RoPE and "
            "cut by an SVD of each context.",
        ),
    )


def _perplexity(found: Results, where: str) -> Figure:
    ranks = list(found.measured.ranks)
    series, told = {}, []
    for name in _names(found, where):
        if name not in key_ways.NO_RUNS:
            times = [found.times((name, where), i).times for i in range(len(ranks))]
            series[name] = (ranks, times)
            told.append(f"{name}: " + ", ".join(f"{x:.3f}" for x in times))
    if where != key_ways.BEHIND and found.measured.key_dim == key_tables.PUBLISHED_CHANNELS:
        published = [x / key_tables.PUBLISHED_BASE for x in key_tables.PUBLISHED_SVD.values()]
        series["GPT-2, SVD of all heads (thin keys)"] = (list(key_tables.PUBLISHED_SVD), published)
        told.append("GPT-2 in thin keys, at 10, 16, 21, 32 and 42: ")
        told[-1] += ", ".join(f"{x:.3f}" for x in published)
    at = ", ".join(map(str, ranks))
    return Figure(
        f"Perplexity by rank, keys of all layers cut {where}",
        draw.lines(series, x="rank r", y="times the model's", log_y=True, level={"the model": 1.0}),
        f"Times the model's own, at ranks {at} of {found.measured.key_dim}. {'; '.join(told)}.",
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
        spreads = list(zip(*found.overlaps(where), strict=True))
        for said, one in zip(("with twice as many", "with all"), spreads, strict=True):
            name = f"{where}, {said}"
            series[name] = (list(of.drift_at), [each.median for each in one])
            told.append(f"{name}: " + ", ".join(f"{each.median:.2f}" for each in one))
        bands[name] = ([each.low for each in one], [each.high for each in one])
    at = ", ".join(f"{t:,}" for t in of.drift_at)
    random = of.drift_rank / of.key_dim
    return Figure(
        "How far the subspace of the first tokens stays",
        draw.lines(
            series, x="first tokens", y="overlap", log_x=True, bands=bands, level={"random": random}
        ),
        f"Medians at {at} of {of.drift_length:,} tokens, two random ones have {random:.2f}. "
        f"{'; '.join(told)}.",
        Text(
            f"The mean squared cosine of the angles between the best subspace of {of.drift_rank} "
            f"of {of.key_dim} channels for the first tokens of a text and that for twice as many, "
            "and for all.",
            "1 is the same subspace: what was kept of the first tokens serves the later ones. "
            "Directions that matter little count like those that matter much; the next figure "
            "weighs them.",
            "Logit spectra, section 5, says that the projection shifts as the context grows, and "
            "does not measure it.",
        ),
    )


def _later(found: Results) -> Figure:
    of, series, bands, level, told = found.measured, {}, {}, {}, []
    for where in found.places():
        *spreads, whole, fixed = found.later(where)
        spreads.append(whole)
        series[where] = ([*of.drift_at, of.drift_length], [one.median for one in spreads])
        bands[where] = ([one.low for one in spreads], [one.high for one in spreads])
        told.append(f"{where}: " + ", ".join(f"{one.median:.2f}" for one in spreads))
        if fixed:
            level[f"fixed, {where}"] = fixed.median
            told.append(f"fixed, {where}: {fixed.median:.2f}")
    at = ", ".join(f"{t:,}" for t in (*of.drift_at, of.drift_length))
    return Figure(
        "What the subspace of the first tokens makes of later logits",
        draw.lines(
            series, x="first tokens", y="|E - E_r| / |E|", log_x=True, bands=bands, level=level
        ),
        f"Medians at {at} first tokens. {'; '.join(told)}.",
        Text(
            f"The error of logits in the second half of {of.drift_length:,} tokens under the best "
            f"subspace of rank {of.drift_rank} for the first tokens, up to all of them; dashed: "
            "under a fixed one, from text that is not measured.",
            "How far a line falls to its last point is what a cache loses that chose its subspace "
            "early and kept it. Above the dashed line, other text would have told it more than "
            "the beginning of this one.",
            "Not measured in any of the papers.",
        ),
    )
