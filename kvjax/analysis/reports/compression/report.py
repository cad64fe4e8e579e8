"""The report on fixed subspaces of keys, on which three papers seem to contradict each other."""

from kvjax.analysis.measures import heads as heads_lib, subspace_methods
from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Figure, Section
from kvjax.analysis.reports.compression import measurements, tables
from kvjax.analysis.reports.compression.results import Results
from kvjax.analysis.request import Request, reference_length
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # tokens, so that halves and eighths are meaningful
_FIRST, _SPREAD = "first tokens", "as many, spread"


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for keys that cannot be cut, and for short rows."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: subspaces of part of a text need at least "
            f"{_SHORTEST} tokens: give longer lengths"
        )
    for mechanism in dict.fromkeys(model.transformer.mechanisms):
        if getattr(mechanism, "position_channels", 0):
            raise UserError(
                f"position_channels = {mechanism.position_channels}: part of each key is its "
                "position's and is not cached: there is no rank to compare"
            )
        if getattr(mechanism, "alibi", False):
            raise UserError(
                "alibi = True: part of each key is its position, which is not cached: there is no "
                "rank to compare"
            )
        if mechanism.query_dim < 2:
            raise UserError("keys of one channel have no lower rank")
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Measures keys cut at equal rank by weights, by text and by context.

    SmolLM2-135M on two texts, rows of 256 tokens and drift over 1,024, takes 95 s on two cores and
    1.6 GB.

    Raises:
      UserError: weights or activations that are not finite.
    """
    long_enough = [length for length in request.lengths if length >= _SHORTEST]
    length, longest = reference_length(long_enough), max(request.lengths)
    measured = measurements.measure(model, request.texts, length, longest)
    return _section(Results(model.name, request, measured))


def _section(found: Results) -> Section:
    return Section(
        name="compression",
        title="Fixed subspaces of keys",
        lead=_lead(found),
        finding=tables.finding(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=tables.data(found),
    )


def _lead(found: Results) -> str:
    rank, channels = found.measured.ranks[found.half], found.measured.key_dim
    return (
        "Can a fixed subspace hold a head's keys? Three papers seem to contradict each other; the "
        f"first table compares their claims with this model, with {rank} of {channels} key "
        "channels kept."
    )


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    figures = [_logits(found, where) for where in found.places()]
    figures += [_perplexity(found, where) for where in found.places()]
    return [*figures, _overlap(found), _later(found)]


def _names(found: Results, where: str) -> list[str]:
    """Returns the methods of a place that have a line."""
    here = [name for name, at in found.ways() if at == where and found.determined((name, at))]
    return [name for name in here if name != subspace_methods.WEIGHTS_MEAN]


_CUT = {
    subspace_methods.BEFORE: "Keys are cut before RoPE and rotated when they are read",
    subspace_methods.AFTER: "Keys are cut after RoPE, as attention uses them",
    subspace_methods.ANYWHERE: "Keys are cut as attention uses them; the model has no RoPE",
}


def _logits(found: Results, where: str) -> Figure:
    ranks = found.measured.ranks
    series, bands = {}, {}
    for name in _names(found, where):
        at = found.determined((name, where))
        spreads = [found.error((name, where), i)["logit"] for i in at]
        series[name] = ([ranks[i] for i in at], [one.median for one in spreads])
        if name in (subspace_methods.CALIBRATED, subspace_methods.CONTEXT):
            bands[name] = ([one.low for one in spreads], [one.high for one in spreads])
    return figures.curves(
        f"Error of logits by rank, keys cut {where}",
        series,
        f"{_CUT[where]}, with r channels kept per KV head: relative error of centred "
        "logits over the visible keys, medians over heads and rows, with quartile bands "
        "for two methods. 'Of this context' uses the whole row, which a growing cache "
        f"cannot; it has the {tables.LEAST}.",
        x="rank r",
        y="|E - E_r| / |E|",
        bands=bands,
    )


def _perplexity(found: Results, where: str) -> Figure:
    ranks, H = found.measured.ranks, found.measured.key_dim
    series = {}
    for name in _names(found, where):
        at = found.runs((name, where))
        if at:
            times = [found.times((name, where), i).times for i in at]
            series[name] = ([ranks[i] for i in at], times)
    has_rope = where == subspace_methods.AFTER
    if not has_rope and H * tables.PUBLISHED_HEADS == tables.PUBLISHED_CHANNELS:
        published = zip(*tables.published_by_rank().values(), strict=True)
        series["GPT-2, SVD of all heads (thin keys)"] = tuple(map(list, published))
    return figures.curves(
        f"Perplexity by rank, keys of all layers cut {where}",
        series,
        f"{_CUT[where]}, in all layers at once: perplexity on the second half of rows of "
        f"{found.measured.length:,} tokens over the model's own. Subspaces are of the "
        "unmodified model, and nothing is fine-tuned. Thin keys, table 5: GPT-2 at half "
        "rank 1.020, at a quarter 1.257, with one SVD of W_K for all heads.",
        x="rank r",
        y="times the model's",
        log_y=True,
        level={"the model": 1.0},
        digits=".3f",
    )


def _overlap(found: Results) -> Figure:
    of, series, bands = found.measured, {}, {}
    for where in found.places():
        for name, spreads in zip((_FIRST, _SPREAD), found.overlaps(where), strict=True):
            _line(f"{where}, {name}", list(of.drift_at), spreads, series, bands)
    random = of.drift_rank / of.key_dim
    return figures.curves(
        "Overlap of the first tokens' subspace with the subspace of all",
        series,
        f"Mean squared cosine between the subspace of {of.drift_rank} of {of.key_dim} "
        "channels for all tokens of a text and the one for its first tokens, or for "
        "equally many spread over it, whose error is that of a small sample: the gap between the "
        f"two lines is the drift. Each has the {tables.LEAST}. Logit spectra, section 5, "
        "asserts a drift and does not measure it.",
        x="tokens",
        y="overlap",
        log_x=True,
        bands=bands,
        level={"random": random},
        digits=".2f",
    )


def _line(name: str, at: list[int], spreads: list[Spread], series: dict, bands: dict) -> None:
    """Adds a line of medians, and quartile bands for first tokens."""
    series[name] = (at, [one.median for one in spreads])
    if name.endswith(_FIRST):
        bands[name] = ([one.low for one in spreads], [one.high for one in spreads])


def _later(found: Results) -> Figure:
    of, series, bands, level = found.measured, {}, {}, {}
    at = [*of.drift_at, of.drift_length]
    for where in found.places():
        later = found.later(where)
        for name, spreads in ((_FIRST, later.first), (_SPREAD, later.spread)):
            _line(f"{where}, {name}", at, [*spreads, later.whole], series, bands)
        if later.fixed:
            level[f"fixed, {where}"] = later.fixed.median
    return figures.curves(
        "Error of later logits under the subspace of the first tokens",
        series,
        f"Error of logits in the second half of {of.drift_length:,} tokens under the "
        f"rank-{of.drift_rank} subspace of the first tokens, and of equally many spread "
        "over the text; dashed: under a fixed one, from text that is not measured. The "
        "gap between the two lines is the loss by drift, the fall of the spread line the "
        "loss by few tokens.",
        x="tokens",
        y="|E - E_r| / |E|",
        log_x=True,
        bands=bands,
        level=level,
        digits=".2f",
    )
