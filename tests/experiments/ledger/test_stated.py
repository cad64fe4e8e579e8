"""What the papers say of their own figures: what holds, and that another figure would not."""

import json

import pytest

from experiments.ledger import (
    logit_spectra,
    logit_spectra_proved,
    lrkv_figures,
    lrkv_stated,
    projection_sharing_caches as caches,
    projection_sharing_stated,
    results as results_lib,
    rounded,
    thin_keys_rules,
    thin_keys_stated,
    verdicts,
)
from kvjax.analysis.measures import logits


def _failing(cases):
    assert cases
    return [name for name, held in cases.items() if not held]


@pytest.mark.parametrize(
    "cases, failing",
    [
        (lrkv_stated.tokens_saved, []),
        (lrkv_stated.entropies, ["128M, MLA", "128M, LRKV"]),
        (lrkv_stated.means, []),
        (lrkv_stated.layers, []),
        (lrkv_stated.differences, []),
        (lrkv_stated.narrows, []),
        (lrkv_stated.steps, ["128M", "2.5B"]),
        (projection_sharing_stated.means, ["Table 3, Q-K=V"]),
        (projection_sharing_stated.exponentials, []),
        (projection_sharing_stated.worse, []),
        (projection_sharing_stated.least_loss, []),
        (thin_keys_stated.percentages, []),
        (thin_keys_stated.shares, []),
        (thin_keys_stated.alike, []),
        (caches._rent, []),
        (logit_spectra._own_gaps, []),
    ],
)
def test_which_figures_do_not_fit_their_own_tables(cases, failing):
    assert _failing(cases()) == failing


@pytest.mark.parametrize(
    "module, table, row, changed, cases, failing",
    [
        (lrkv_stated, "_SAVED", "MHA", "9.9", lrkv_stated.tokens_saved, ["MHA"]),
        (
            lrkv_figures,
            "TABLE_2",
            "2.5B, GQA",
            ("2.397", "0.727"),
            lrkv_stated.entropies,
            ["2.5B, GQA"],
        ),
        (lrkv_figures, "LARGE", "MQA", (91.0, 91.0), lrkv_stated.layers, ["MQA, uncentred"]),
        (lrkv_figures, "SMALL", "MQA", (90.0, 83.0), lrkv_stated.narrows, ["uncentred"]),
        (
            projection_sharing_stated,
            "_TABLE_4",
            "MQA",
            ("1.72", "5.59", "1.65", "5.29"),
            projection_sharing_stated.exponentials,
            ["MQA, validation"],
        ),
        (
            projection_sharing_stated,
            "_WORSE",
            "MQA",
            "2.5",
            projection_sharing_stated.worse,
            ["MQA at 300M, %"],
        ),
        (
            projection_sharing_stated,
            "_TABLE_10",
            "MQA",
            ("5.057", "0.056", "1.06"),
            projection_sharing_stated.worse,
            ["MQA at 1.2B"],
        ),
        (
            projection_sharing_stated,
            "_WORSE",
            "Q-MQA",
            "5.0",
            projection_sharing_stated.least_loss,
            ["Q-MQA at 300M"],
        ),
        (
            thin_keys_stated,
            "_PERPLEXITIES",
            "Table 8, 192",
            ("23.77", "22.80", "4.4"),
            thin_keys_stated.alike,
            ["d/4"],
        ),
        (
            thin_keys_stated,
            "_PERPLEXITIES",
            "Table 8, 96",
            ("24.45", "22.80", "6.2"),
            thin_keys_stated.percentages,
            ["Table 8, 96"],
        ),
        (
            thin_keys_stated,
            "_SAVED",
            "Table 6, 512",
            (512 / 768, "17"),
            thin_keys_stated.shares,
            ["Table 6, 512"],
        ),
        (
            logit_spectra,
            "_LEARNED",
            "Qwen-3B (128)",
            60,
            logit_spectra._own_gaps,
            ["Qwen-3B (128)"],
        ),
    ],
)
def test_another_figure_would_not_fit(monkeypatch, module, table, row, changed, cases, failing):
    before = _failing(cases())
    monkeypatch.setattr(module, table, getattr(module, table) | {row: changed})
    after = _failing(cases())
    assert [name for name in after if name not in before] == failing


def test_the_order_of_both_sizes_is_compared(monkeypatch):
    small, large = projection_sharing_stated.orders()
    assert small == large == ["QKV", "GQA", "MQA", "Q-K=V", "Q-GQA", "Q-MQA"]
    swapped = projection_sharing_stated._TABLE_10 | {"MQA": ("5.300", "", "")}
    monkeypatch.setattr(projection_sharing_stated, "_TABLE_10", swapped)
    assert projection_sharing_stated.orders()[1][-1] == "MQA"


def test_a_figure_that_is_printed_twice():
    assert rounded.twice("0.726", "0.73").judge().verdict == verdicts.CONSISTENT
    found = rounded.twice("0.726", "0.729").judge()
    assert found == ("inconsistent", "0 of 1 cases; 0.726 here, 0.729 there")


def test_whole_trainings_by_what_is_printed_of_mqa():
    assert lrkv_figures.budgets() == dict(MHA=733, GQA=710, MLA=706)


def test_lrkvs_training_by_equations_3_and_4():
    """Counts each head's products with r latents, and no weights that make its keys and values."""
    d, heads, layers, rank, tokens = 2304, 18, 36, 64, 2048
    mha = layers * (12 * d * d + 2 * tokens * d) + 65_536 * d
    weights = 2 * d * 128 + 2 * heads * rank * (d + 128) - 2 * d * d
    more = layers * (weights + 2 * tokens * heads * rank)
    assert lrkv_figures.by_equations_3_and_4() == pytest.approx(100 * more / mha)
    assert lrkv_figures.lrkv_flops() == {"more than MHA": True, "0.8 %": False}


def test_weights_of_keys_and_values_are_those_of_equation_7():
    """2·d·d_h + 2Hr(d + d_h) of 2·H·d·d_h, in %."""
    found = lrkv_figures.key_value_weights()
    for scale, d, heads in (("128M", 768, 6), ("2.5B", 2304, 18)):
        ours = 2 * d * 128 + 2 * heads * 64 * (d + 128)
        assert found[scale] == pytest.approx(100 * ours / (2 * heads * d * 128))


def test_caches_of_groups_and_of_32_users_are_those_of_the_formulas():
    for name, groups, heads in (
        ("Q-GQA-4 at 300M", 4, 16),
        ("Q-GQA-8 at 1.2B", 8, 32),
    ):
        said, ours = caches._grouped()[name]
        assert said == pytest.approx(100 * (1 - 1 / (2 * groups)))
        assert ours == pytest.approx(100 * (1 - groups / (2 * heads)))
    for name, heads in (("QKV", 64), ("MQA", 2), ("Q-MQA", 1)):
        ours = 32 * 32_768 * 22 * heads * 64 * 2 / 1e9  # layers, keys' and values' heads, bytes
        assert caches._batch()[name][1] == pytest.approx(ours)


def _tasks(results, task, published, converged):
    """A result of retrieval by channels: the batch of each seed, None where it never converged."""
    rows, runs = [], {}
    for channels, batches in converged.items():
        there = [x for x in batches if x is not None]
        mean = sum(there) / len(there) if there else None
        half = 50.0 if len(there) > 1 else None
        row = dict(task=task, channels=channels, seeds=len(batches), converged_runs=len(there))
        row |= dict(converged=mean, converged_half_interval=half)
        rows.append(row | dict(published_converged=published[channels]))
        runs[f"{task}/d{channels}"] = {str(i): dict(converged=x) for i, x in enumerate(batches)}
    (results / "thin_keys_tasks.json").write_text(json.dumps(dict(rows=rows, runs=runs)))


def test_when_a_task_converges_is_told_by_all_seeds(results):
    published = {4: None, 8: 200, 16: 200, 32: 200, 64: 200}
    batches = {4: [None] * 3, 8: [200, 240, 250], 16: [200, None, 200], 32: [400, 400, 400]}
    batches[64] = [300, 300, 300]
    _tasks(results, "retrieval", published, batches)
    rule = thin_keys_rules.Converges("retrieval")
    same, other, untold = "reproduced", "contradicted", "not told apart"
    assert list(rule.told().values()) == [same, same, other, other, untold]
    verdict, said = rule.judge()
    assert verdict == "in part" and "2 of 5 cases as there, 1 not told apart, margin 100" in said
    assert "until 95 % are right" in said and "4: 0 of 3 seeds" in said and "8: 230 ± 50" in said
    batches[4] = [None, 900, None]
    _tasks(results, "retrieval", published, batches)
    assert rule.told()[4] == other


def test_later_is_told_seed_by_seed(results):
    _tasks(results, "copy_back_l2", {4: 300, 8: 200}, {4: [600, 700, 800], 8: [200, 300, None]})
    found, seeds = thin_keys_rules.later("copy_back_l2", 4, 8)()
    assert found.mean == pytest.approx(400) and seeds == 2
    with pytest.raises(results_lib.NoResultError):
        thin_keys_rules.later("copy_back_l2", 4, 16)()


def test_each_random_head_is_held_against_its_own_bound(monkeypatch):
    found = logit_spectra_proved.heads()
    assert len(found) == 36 and all(0 < worst <= bound for worst, bound in found.values())
    assert logit_spectra_proved.CLAIMS[0].judge().verdict == verdicts.REPRODUCED
    whole = logits.softmax_bound
    monkeypatch.setattr(logits, "softmax_bound", lambda field, rank: whole(field, rank) / 100)
    assert logit_spectra_proved.CLAIMS[0].judge().verdict == verdicts.PART


def test_softmax_moves_by_no_more_than_the_largest_change_of_a_logit():
    found = logit_spectra_proved.lipschitz()
    assert max(found.values()) <= 1 and found["two even logits"] == pytest.approx(1, abs=1e-5)
    assert found["4,000 random pairs"] > 0.5
