"""The report on fixed subspaces of keys, about which three papers seem to disagree."""

from kvjax.analysis.measures import heads as heads_lib, subspace_methods
from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Figure, Section
from kvjax.analysis.reports.compression import measurements, tables
from kvjax.analysis.reports.compression.results import Results
from kvjax.analysis.request import Request, reference_length
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # fewest tokens of a row, so that an eighth of it is more than one token
_FIRST, _EVEN = "first tokens", "evenly spread tokens"
_UNCACHED = (
    "part of each key encodes its position and is not cached, so that the rank of what is cached "
    "is not the key's"
)


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError if rows are too short, or if keys have no lower rank to compare."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: subspaces of part of a text need at least "
            f"{_SHORTEST} tokens: give longer lengths"
        )
    for mechanism in dict.fromkeys(model.transformer.mechanisms):
        if getattr(mechanism, "position_channels", 0):
            raise UserError(f"position_channels = {mechanism.position_channels}: {_UNCACHED}")
        if getattr(mechanism, "alibi", False):
            raise UserError(f"alibi = True: {_UNCACHED}")
        if mechanism.query_dim < 2:
            raise UserError("keys of one channel have no lower rank")
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Compares subspaces of keys that are computed from weights, from text and from the context.

    For SmolLM2-135M and two texts, with rows of 256 tokens and drift over 1,024 tokens, this takes
    95 s on two cores and 1.6 GB.

    Raises:
      UserError: weights or activations that are not finite.
    """
    long_enough = [length for length in request.lengths if length >= _SHORTEST]
    length, longest = reference_length(long_enough), max(request.lengths)
    measured = measurements.measure(model, request.texts, length, longest)
    return _section(Results(model.name, request, measured))


def _section(results: Results) -> Section:
    return Section(
        name="compression",
        title="Fixed subspaces of keys",
        lead=_lead(results),
        finding=tables.finding(results),
        figures=_figures(results),
        tables=tables.tables(results),
        data=tables.data(results),
    )


def _lead(results: Results) -> str:
    rank, channels = results.measured.ranks[results.half_rank], results.measured.key_dim
    return (
        "Can a fixed subspace hold a head's keys? Three papers seem to contradict each other; the "
        f"first table compares their claims with this model, with {rank} of {channels} key "
        "channels kept."
    )


# -- figures ---------------------------------------------------------------------------------------


def _figures(results: Results) -> list[Figure]:
    figures = [_logits(results, where) for where in results.places()]
    figures += [_perplexity(results, where) for where in results.places()]
    return [*figures, _overlap(results), _later_errors(results)]


def _names(results: Results, where: str) -> list[str]:
    """Returns the methods that figures show for keys cut at a place, before or after RoPE."""
    names = [
        name
        for name, cut in results.methods()
        if cut == where and results.determined_ranks((name, cut))
    ]
    return [name for name in names if name != subspace_methods.WEIGHTS_MEAN]


_CUT = {
    subspace_methods.BEFORE: "Keys are cut before RoPE and rotated when they are read",
    subspace_methods.AFTER: "Keys are cut after RoPE, as attention uses them",
    subspace_methods.ANYWHERE: "Keys are cut as attention uses them; the model has no RoPE",
}


def _logits(results: Results, where: str) -> Figure:
    ranks = results.measured.ranks
    series, bands = {}, {}
    for name in _names(results, where):
        indices = results.determined_ranks((name, where))
        spreads = [results.error((name, where), i)["logit"] for i in indices]
        series[name] = ([ranks[i] for i in indices], [spread.median for spread in spreads])
        if name in (subspace_methods.CALIBRATED, subspace_methods.CONTEXT):
            bands[name] = ([spread.low for spread in spreads], [spread.high for spread in spreads])
    return figures.curves(
        f"Error of logits by rank, keys cut {where}",
        series,
        f"{_CUT[where]}, with r channels kept per KV head: relative error of centred "
        "logits over the visible keys, medians over heads and rows, with quartile bands "
        "for two methods. 'Of this context' uses the whole row, which a growing cache "
        f"cannot; its subspace minimises {tables.MINIMISED}.",
        x="rank r",
        y="|E - E_r| / |E|",
        bands=bands,
    )


def _perplexity(results: Results, where: str) -> Figure:
    ranks, H = results.measured.ranks, results.measured.key_dim
    series = {}
    for name in _names(results, where):
        indices = results.ranks_run((name, where))
        if indices:
            times = [results.relative_perplexity((name, where), i).times for i in indices]
            series[name] = ([ranks[i] for i in indices], times)
    has_rope = where == subspace_methods.AFTER
    if not has_rope and H * tables.PUBLISHED_HEADS == tables.PUBLISHED_CHANNELS:
        published = zip(*tables.published_by_rank().values(), strict=True)
        series["GPT-2, SVD of all heads (thin keys)"] = tuple(map(list, published))
    return figures.curves(
        f"Perplexity by rank, keys of all layers cut {where}",
        series,
        f"{_CUT[where]}, in all layers at once: perplexity on the second half of rows of "
        f"{results.measured.length:,} tokens, divided by the model's own. Subspaces are of the "
        "unmodified model, and nothing is fine-tuned. Thin keys, table 5: GPT-2 at half "
        "rank 1.020, at a quarter 1.257, with one SVD of W_K for all heads.",
        x="rank r",
        y="times the model's",
        log_y=True,
        levels={"the model": 1.0},
        digits=".3f",
    )


def _overlap(results: Results) -> Figure:
    measured, series, bands = results.measured, {}, {}
    for where in results.places():
        for name, spreads in zip((_FIRST, _EVEN), results.overlaps(where), strict=True):
            _line(f"{where}, {name}", list(measured.drift_at), spreads, series, bands)
    random = measured.drift_rank / measured.key_dim
    return figures.curves(
        "Overlap of the first tokens' subspace with the subspace of all",
        series,
        "Mean squared cosine between the subspace of all tokens of a text "
        f"({measured.drift_rank} of {measured.key_dim} channels) and the subspace of a part: its "
        "first tokens, or equally many tokens spread evenly over it. Spread tokens show the error "
        "of a small sample, so the gap between the two lines is the drift. Each subspace minimises "
        f"{tables.MINIMISED}. Logit spectra, section 5, asserts a drift and does not measure it.",
        x="tokens",
        y="overlap",
        log_x=True,
        bands=bands,
        levels={"random": random},
        digits=".2f",
    )


def _line(name: str, counts: list[int], spreads: list[Spread], series: dict, bands: dict) -> None:
    """Adds a line of medians to a figure and, for first tokens, the band of quartiles."""
    series[name] = (counts, [spread.median for spread in spreads])
    if name.endswith(_FIRST):
        bands[name] = ([spread.low for spread in spreads], [spread.high for spread in spreads])


def _later_errors(results: Results) -> Figure:
    measured, series, bands, levels = results.measured, {}, {}, {}
    counts = [*measured.drift_at, measured.drift_length]
    for where in results.places():
        later = results.later(where)
        for name, spreads in ((_FIRST, later.first), (_EVEN, later.spread)):
            _line(f"{where}, {name}", counts, [*spreads, later.whole], series, bands)
        if later.fixed:
            levels[f"fixed, {where}"] = later.fixed.median
    return figures.curves(
        "Error of later logits under the subspace of the first tokens",
        series,
        f"Error of logits in the second half of {measured.drift_length:,} tokens, with keys in a "
        f"subspace of rank {measured.drift_rank}: the subspace of the first tokens, the subspace "
        "of equally many tokens spread evenly over the text, or (dashed) a fixed one from text "
        "that is not measured. The gap between the first two is the cost of drift. The fall of the "
        "second, as tokens are added, shows the cost of a small sample.",
        x="tokens",
        y="|E - E_r| / |E|",
        log_x=True,
        bands=bands,
        levels=levels,
        digits=".2f",
    )
