"""Tables of the report on keys of low rank with the papers' rows, and its data."""

import dataclasses

from kvjax.analysis import key_measurements
from kvjax.analysis.key_results import Results
from kvjax.analysis.logit_results import Spread
from kvjax.analysis.logit_tables import PUBLISHED_RANKS
from kvjax.analysis.section import Column
from kvjax.analysis.section import Table
from kvjax.analysis.section import Text

# Thin keys, table 5: truncated SVD of GPT-2's W_K, all heads together: rank per head, perplexity.
PUBLISHED_SVD = {10: 57.37, 16: 31.32, 21: 27.49, 32: 25.40, 42: 25.23}
PUBLISHED_BASE, PUBLISHED_CHANNELS = 24.91, 64
MATRICES = (
    key_measurements.SPECTRUM_WEIGHTS,
    key_measurements.SPECTRUM_JOINT,
    key_measurements.SPECTRUM_INTERACTION,
    key_measurements.SPECTRUM_KEYS,
    key_measurements.SPECTRUM_CENTRED,
    key_measurements.SPECTRUM_LOGITS,
)
_OF = {
    key_measurements.SPECTRUM_WEIGHTS: "LRKV, section 4",
    key_measurements.SPECTRUM_JOINT: "thin keys, table 5",
    key_measurements.SPECTRUM_INTERACTION: "logit spectra, section 5",
    key_measurements.SPECTRUM_LOGITS: "logit spectra, table 2",
}


def tables(found: Results) -> list[Table]:
    """All of the report's."""
    return [_spectra(found), _ways(found), _by_text(found), _drift(found)]


def middle_half(of: Spread, form: str = ".3g") -> str:
    """Quartiles as text."""
    return f"{of.low:{form}} to {of.high:{form}}"


def _spectra(found: Results) -> Table:
    rows = []
    for name in MATRICES:
        of = found.spectrum(name)
        if of is not None:
            dim = found.channels(name)
            share = 100 * of.median / dim
            rows.append([found.name, name, _OF.get(name), dim, of.median, middle_half(of), share])
    for model, (dim, m, e) in PUBLISHED_RANKS.items():
        for name, published in (
            (key_measurements.SPECTRUM_INTERACTION, m),
            (key_measurements.SPECTRUM_LOGITS, e),
        ):
            share = 100 * published[1] / dim
            rows.append([f"{model} (the paper)", name, _OF[name], dim, published[1], None, share])
    return Table(
        "Components for 90 % of the energy, of what each paper speaks of",
        [
            Column("model"),
            Column("matrix"),
            Column("spoken of in"),
            Column("channels", "d"),
            Column("components", ".4g"),
            Column("middle half"),
            Column("% of channels", ".0f"),
        ],
        rows,
        Text(
            "How many singular components hold 90 % of the squared singular values of each matrix: "
            f"medians over heads, and over texts ({found.measured.length:,} tokens) where there "
            "are any.",
            "Few components of many channels: a narrow cache could hold it. Keys are before RoPE; "
            "their mean is one direction with much energy and costs a cache nothing. E is behind "
            "RoPE, over all keys.",
            "The papers' three statements are about the first, the second and the third to sixth "
            "row. Only logit spectra gives numbers: table 2, at 256 tokens.",
        ),
    )


def _ways(found: Results) -> Table:
    rows = []
    for row in found.rows():
        logit, output = (Spread(**row[name]) for name in ("logit", "output"))
        ppl = row["perplexity"]
        of_ppl = [ppl["times"], f"{ppl['low']:.3f} to {ppl['high']:.3f}"] if ppl else [None, None]
        of = [logit.median, middle_half(logit), output.median, middle_half(output)]
        rows.append([row["way"], row["where"], row["rank"], 100 * row["share"], *of, *of_ppl])
    for r, perplexity in PUBLISHED_SVD.items():
        share, times = 100 * r / PUBLISHED_CHANNELS, perplexity / PUBLISHED_BASE
        name = "SVD of W_K, all heads: GPT-2 (thin keys)"
        rows.append([name, "no RoPE", r, share, None, None, None, None, times, None])
    return Table(
        "What cutting keys at rank r costs, by way",
        [
            Column("subspace"),
            Column("cut"),
            Column("r", "d"),
            Column("% of channels", ".1f"),
            Column("|E - E_r| / |E|", ".3f"),
            Column("middle half"),
            Column("|o - o_r| / |o|", ".3f"),
            Column("middle half of outputs"),
            Column("perplexity, times", ".3f"),
            Column("95 %"),
        ],
        rows,
        Text(
            f"Errors of logits (centred over the keys that a query sees) and of outputs, medians "
            f"over {found.num_heads:,} heads and {len(found.measured.texts_B)} rows, and "
            "perplexity with the keys of all layers cut so: of some 64 queries, evenly, and of all "
            f"tokens in the second half of rows of {found.measured.length:,} tokens. The last "
            "column takes tokens as independent.",
            f"{_how_found(found)} 'Mean kept' is the SVD with the keys' mean left whole, as the "
            "ways from text have it: a control.",
            "Thin keys, table 5: GPT-2, WikiText-2, keys only; 2.0 % at half rank. GPT-2 has no "
            "RoPE, and 12 heads that share one SVD.",
        ),
    )


def _how_found(found: Results) -> str:
    fixed = (
        "Fixed subspaces are found on rows of all texts from behind what is measured, or of the "
        "other texts alone"
        if found.measured.later
        else "Texts are too short for rows that are not measured: fixed subspaces for a text are "
        "those of the other texts, and there are none of a single text"
    )
    return (
        f"r of {found.measured.key_dim} channels are kept of each KV head. {fixed}; those 'of this "
        "context' know the whole row, also tokens that a query does not see; those 'of its first "
        "half' do not."
    )


def _by_text(found: Results) -> Table:
    base, each = found.perplexity(None)
    rows = [["the model", None, None, base, *each.values()]]
    for row in found.rows():
        if row["perplexity"]:
            of = row["perplexity"]
            rows.append([row["way"], row["where"], row["rank"], of["perplexity"]])
            rows[-1] += of["by_text"].values()
    return Table(
        "Perplexity with keys of rank r",
        [Column("subspace"), Column("cut"), Column("r", "d"), Column("all texts", ".2f")]
        + [Column(name, ".2f") for name in found.texts],
        rows,
        Text(
            f"Perplexity on the second halves of rows of {found.measured.length:,} tokens, all "
            "together and of each text.",
            "Texts differ in how hard they are; what a cut costs is seen against the first row.",
            "Thin keys, table 5, has 24.91 of GPT-2 on WikiText-2 as it is.",
        ),
    )


def _drift(found: Results) -> Table:
    of, rows = found.measured, []
    for where in found.places():
        later = found.later(where)
        for t, (twice, whole) in enumerate(found.overlaps(where)):
            rows.append([where, f"first {of.drift_at[t]:,}", twice.median, middle_half(twice)])
            rows[-1] += [whole.median, later[t].median, middle_half(later[t])]
        for name, one in ((f"all {of.drift_length:,}", later[-2]), ("fixed", later[-1])):
            if one is not None:
                rows.append([where, name, None, None, None, one.median, middle_half(one)])
    return Table(
        "Drift of the subspace of a text's first tokens",
        [
            Column("cut"),
            Column("subspace of tokens"),
            Column("overlap with twice as many", ".3f"),
            Column("middle half"),
            Column("with all", ".3f"),
            Column("|E - E_r| / |E| later", ".3f"),
            Column("middle half of errors"),
        ],
        rows,
        Text(
            f"At rank {of.drift_rank} of {of.key_dim}: the mean squared cosine between the "
            "subspace of the first tokens and those of twice as many and of all, and the error "
            f"that it makes of logits in the second half of {of.drift_length:,} tokens.",
            f"Overlap 1 is the same subspace, {of.drift_rank / of.key_dim:.2f} what two random "
            "ones have. 'Fixed' is found on text that is not measured.",
            "Logit spectra, section 5: 'a projection that shifts as the context grows'; it does "
            "not measure that.",
        ),
    )


def data(found: Results) -> dict:
    """Every number."""
    of = found.measured
    spreads = lambda many: [one and dataclasses.asdict(one) for one in many]
    return dict(
        model=found.name,
        channels=of.key_dim,
        num_heads=found.num_heads,
        texts=list(found.texts),
        tokens=of.length,
        rows=len(of.texts_B),
        fixed_from_later_text=of.later,
        perplexity=dict(zip(("all", "by_text"), found.perplexity(None), strict=True)),
        ways=list(found.rows()),
        spectra={
            name: dict(channels=found.channels(name), **dataclasses.asdict(found.spectrum(name)))
            for name in MATRICES
            if name in of.spectra
        },
        drift=dict(
            rank=of.drift_rank,
            tokens=list(of.drift_at),
            of=of.drift_length,
            overlap={
                where: dict(
                    zip(
                        ("twice", "all"),
                        map(spreads, zip(*found.overlaps(where), strict=True)),
                        strict=True,
                    )
                )
                for where in found.places()
            },
            later_error={where: spreads(found.later(where)) for where in found.places()},
        ),
        errors_of_heads={
            f"{name}, {where}": errors.tolist() for (name, where), errors in of.errors.items()
        },
        published=dict(thin_keys_table_5=PUBLISHED_SVD, perplexity=PUBLISHED_BASE),
    )
