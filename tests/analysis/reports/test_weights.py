"""The reports on weights, of tiny models."""

import numpy as np
import pytest

from kvjax.analysis import words
from kvjax.analysis.measures import diversity, geometry, heads as heads_lib, projections
from kvjax.analysis.reports.diversity import report as diversity_report
from kvjax.analysis.reports.diversity.measurements import ModelDiversity
from kvjax.analysis.reports.geometry import measurements, report as geometry_report
from kvjax.analysis.reports.projections import report as projections_report
from kvjax.analysis.request import Request
from kvjax.foundation.errors import UserError
from tests import golden, quick
from tests.analysis import models
from tests.convert import workdirs
from tests.convert.workdirs import grouped

NOTHING = Request(texts={}, lengths=())
REPORTS = dict(diversity=diversity_report, geometry=geometry_report, projections=projections_report)
OTHERS = {
    "mla": workdirs.mla(),
    "kv_tied": grouped(4, 1, 3, tie="kv"),
    "wide_values": grouped(4, 1, 3, value_dim=12),
}


def _model(name, seed=0, block="nanochat"):
    mechanisms = OTHERS.get(name)
    if mechanisms is None:
        block, mechanisms, _ = workdirs.MODELS[name]
    return _made(mechanisms, seed, name, block)


def _made(mechanisms, seed=0, name="made", block="nanochat"):
    model = workdirs.Made(workdirs.config(block, mechanisms), seed)
    model.name = name
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ("mha", "gpt2_lrkv", "lrkv_by_layer", *OTHERS))
@pytest.mark.parametrize("report", REPORTS)
def test_reports_of_every_kind_of_mechanism(report, name):
    section = REPORTS[report].section(_model(name), NOTHING)
    assert section.name == report
    models.check_section(section)
    assert len(section.tables[-1].rows) == workdirs.LAYERS


def test_diversity_has_the_numbers_of_every_layer():
    model, beside = _model("gqa"), _model("mha", seed=1)
    section = diversity_report.section(model, Request({}, (), beside=beside))
    models.check_section(section)
    assert list(section.data["models"]) == ["gqa", "mha (beside)"]
    data = section.data["models"]["gqa"]
    for index, heads in enumerate(heads_lib.layers(model)):
        plain = diversity.of_layer(heads)
        rotated = diversity.of_layer(heads, num_distances=model.context)
        found = data["key"][index]
        assert found["share"] == plain.share
        assert found["centred_share_of_possible"] == plain.centred_share_of_possible
        assert found["similarity"] == plain.similarity_NN.tolist()
        assert found["gram"] == plain.gram_NN.tolist() != found["similarity"]
        assert data["key_with_rope"][index]["gram"] == rotated.gram_NN.tolist()
        assert found["components"]["0.9"] == plain.components()
        assert data["key_with_rope"][index]["share"] == rotated.share != plain.share
        assert data["value"][index]["rank"] == diversity.of_layer(heads, "value").rank
        row = section.tables[1].rows[index]
        assert row[:3] == [index, plain.rank, 100 * plain.share]
        assert row[9] == 100 * rotated.share
    means, *published = section.tables[0].rows
    assert means[4] == pytest.approx(100 * np.mean([one["share"] for one in data["key"]]))
    row = next(row for row in published if row[1:3] == ["MHA", "2.5B"])
    assert row[3:6] == [18, 98.9, 94.0] and row[6] == pytest.approx(94.0 * 18 / 17)


REFUSED = dict(  # mechanism, mechanism of --beside, and the reports that refuse them
    one_head=(grouped(1, 1, num_heads=1), None, {"diversity"}),
    one_head_beside=(grouped(4, 4), grouped(1, 1, num_heads=1), {"diversity"}),
    not_linear=(
        grouped(4, 1, 3, rope="shared", qk_norm="rms_gain"),
        None,
        {"diversity", "projections"},
    ),
    not_linear_beside=(
        grouped(4, 4),
        grouped(4, 1, 3, rope="shared", qk_norm="rms_gain"),
        {"diversity", "geometry"},
    ),
)


@pytest.mark.parametrize("report", quick.every(3, REPORTS))
@pytest.mark.parametrize(
    "case", quick.only(["not_linear", "one_head_beside", "not_linear_beside"], REFUSED)
)
def test_unsuitable_models_are_refused_before_weights_are_read(report, case, monkeypatch):
    mechanism, other, refusing = REFUSED[case]
    pair = [_made(mechanism), other and _made(other, name="other")]
    request = Request({}, (), beside=pair[1])
    with monkeypatch.context() as patched:
        patched.setattr(workdirs.Made, "read", None)
        if report in refusing:
            with pytest.raises(UserError, match=f"layer 0 of {'other' if other else 'made'}"):
                REPORTS[report].check(pair[0], request)
        else:
            REPORTS[report].check(pair[0], request)
    if report not in refusing:
        models.check_section(REPORTS[report].section(pair[0], request))


@pytest.mark.slow
def test_snapshots_of_heads_without_matrices_have_no_diversity():
    model = _made(grouped(4, 1, 3, rope="shared", qk_norm="rms_gain"))
    section = geometry_report.section(model, Request({}, (), snapshots=[(0, model), (5, model)]))
    models.check_section(section)
    assert section.data["snapshots"][0]["share"] is None
    assert section.data["snapshots"][0]["key_total_norm"] > 0


def test_stages():
    assert list(words.stages(30).values()) == [0, 15, 29]
    assert list(words.stages(2).values()) == [0, 1]
    assert words.stages(1) == {"early, layer 0": 0}


def test_geometry_has_the_numbers_of_every_layer_and_head():
    model, beside = _model("lrkv_gqa"), _model("mha", seed=1)
    section = geometry_report.section(model, Request({}, (), beside=beside))
    models.check_section(section)
    for index in range(workdirs.LAYERS):
        parts, whole = geometry.of_layer(model, index), geometry.totals(beside, index)
        for name, each in parts.items():
            found = section.data["layers"][index][name]
            raw, mean = geometry.part_geometry(each), geometry.part_geometry(each.canonical())
            assert found["base_norm"] == raw.base_norm_J.tolist()
            assert found["canonical_residual_norm"] == mean.residual_norm_K.tolist()
            assert found["cosine"] == raw.cosine_K.tolist()
            assert found["overlap"] == raw.overlap_K.tolist() != found["random_overlap"]
            assert found["canonical_overlap"] == mean.overlap_K.tolist()
            assert found["angles"] == [angles.tolist() for angles in raw.angles]
            own = geometry.best_residuals(each.canonical(), mean, each, raw.reads)
            there = geometry.canonical_parts(whole[name], 2, 3)
            other = geometry.best_residuals(there, geometry.part_geometry(there), each, raw.reads)
            assert found["lost_with_mean"] == own.with_mean_K.tolist()
            assert found["beside_lost_alone"] == other.alone_K.tolist()
            assert found["beside_best_overlap"] == other.overlap_K.tolist()
            assert found["best_distance"] == own.distance_K.tolist()
            assert found["beside_best_distance"] == other.distance_K.tolist()
            assert found["random_best_distance"] != found["best_distance"]
            assert found["beside_norm"] == geometry.norms(whole[name]).tolist()
        row = section.tables[0].rows[index]
        norm_K = geometry.norms(parts["key"].total_DKH)
        assert row[:4] == [index, 3, pytest.approx(norm_K.mean()), pytest.approx(norm_K.std())]
        assert row[4] == pytest.approx(geometry.norms(whole["key"]).mean())


@pytest.mark.slow
def test_random_factors_are_of_the_seed():
    def of(seed):
        return geometry_report.section(_model("lrkv"), Request({}, (), seed=seed)).data

    layers = [of(seed)["layers"] for seed in (0, 0, 1)]
    drawn = [[layer["key"]["random_overlap"] for layer in found] for found in layers]
    assert drawn[0] == drawn[1]
    assert not np.allclose(drawn[0], drawn[2])
    assert not np.allclose(drawn[0][0], drawn[0][1])  # layers have their own


@pytest.mark.slow
@pytest.mark.parametrize("name", ("lrkv", "mha"))
def test_snapshots(name):
    snapshots = [(step, _model(name, seed)) for seed, step in enumerate((0, 50, 100))]
    request = Request({}, (), snapshots=snapshots)
    section = geometry_report.section(snapshots[-1][1], request)
    models.check_section(section)
    found = section.data["snapshots"]
    assert [moment["step"] for moment in found] == [0, 50, 100]
    for moment, (_, model) in zip(found, snapshots, strict=True):
        layers = [diversity.of_layer(heads) for heads in heads_lib.layers(model)]
        assert moment["share"] == pytest.approx(np.mean([one.share for one in layers]))
        assert moment["centred"] == [one.centred_N.tolist() for one in layers]
        whole = [geometry.totals(model, i) for i in range(workdirs.LAYERS)]
        for part in ("key", "value"):
            norms = [geometry.norms(layer[part]).mean() for layer in whole]
            assert moment[f"{part}_total_norm"] == pytest.approx(np.mean(norms))
        assert (moment["key_overlap"] is None) == (name == "mha")
    over = [f.title for f in section.figures if f.title.endswith("over training")]
    assert len(over) == (4 if name == "lrkv" else 3)


def test_projections_has_the_numbers_of_every_layer():
    model = _model("gqa")
    section = projections_report.section(model, NOTHING)
    for index, heads in enumerate(heads_lib.layers(model)):
        of = projections.of_heads(heads)
        products, found = projections.ProjectionProducts(of), section.data["layers"][index]
        assert found["cosine"]["query_key"] == projections.cosine(of["query"], of["key"])
        assert found["overlap"]["key_value"] == products.overlap("key", "value")
        by_values, by_squares = products.effective_ranks("value")
        assert found["by_values"]["value"] == by_values / 16
        assert found["by_squares"]["value"] == by_squares / 16
        assert found["possible"] == dict(query=24, key=16, value=16)
        chance = found["cosine_by_chance"]
        assert chance["query_key"] == (24 * 32) ** -0.5 and chance["key_value"] == (24 * 16) ** -0.5
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    mean = np.mean([layer["cosine"]["key_value"] for layer in section.data["layers"]])
    assert rows["cosine, key and value"] == pytest.approx([mean, 384**-0.5, 0.73])
    assert rows["effective rank by squares, value"][2] == 702 / 1024


@pytest.mark.slow
def test_reports_of_layers_without_some_measure():
    """Leaves out RoPE's means without RoPE, and cosines of different head widths."""
    found = diversity_report.section(_model("gpt2_lrkv"), NOTHING).data["models"]["gpt2_lrkv"]
    assert found["key_with_rope"] == [] and found["distances"] is None
    layer = projections_report.section(_model("wide_values"), NOTHING).data["layers"][0]
    assert layer["cosine"]["key_value"] is None and layer["cosine"]["query_key"] is not None
    assert layer["overlap"]["key_value"] is not None


@pytest.mark.slow
def test_levels_are_drawn_for_models_of_one_number_of_heads():
    two = grouped(2, 2, num_heads=2)
    for mechanism, heads in ((grouped(2, 2), 4), (two, 2), ([two, grouped(4, 4), two], "2 or 4")):
        other = _made(mechanism)
        section = diversity_report.section(_model("mha"), Request({}, (), beside=other))
        both = section.figures[2].svg
        assert all((f">{name}</text>" in both) == (heads == 4) for name in ("N", "N - 1"))
        rows = {row[0]: row[3] for row in section.tables[0].rows if row[2] == "here"}
        assert rows["mha"] == 4
        assert rows["made (beside)"] == (heads if isinstance(heads, int) else f"{heads} heads")


def test_zero_forms_are_listed():
    plain = [diversity.of_gram(np.diag(x)) for x in ([1.0, 2.0, 3.0], [1.0, 0.0, 0.0])]
    found = ModelDiversity("made", "MHA", 40, plain, None, plain)
    assert [row[-1] for row in diversity_report._layer_table(found).rows] == [None, "1, 2"]


def test_geometry_without_residuals_shows_norms_only():
    model = _model("mha")
    section = geometry_report.section(model, NOTHING)
    assert "no residuals" in section.lead and len(section.figures) == 2
    found = section.data["layers"][1]["value"]
    norms = geometry.norms(geometry.totals(model, 1)["value"])
    assert found["total_norm"] == norms.tolist() and found["base_norm"] is None


@pytest.mark.slow
def test_layers_without_residuals_have_norms_only():
    section = geometry_report.section(_model("lrkv_by_layer"), NOTHING)
    key = [layer["key"] for layer in section.data["layers"]]
    assert [one["rank"] for one in key] == [3, 0, 5] and key[1]["cosine"] is None


@pytest.mark.slow
def test_zero_residuals_have_no_overlap():
    model = _model("lrkv")
    for name in ("expand_key", "expand_value"):
        model.weights["segments", 0, "attention", "mechanism", name][:] = 0
    section = geometry_report.section(model, Request({}, (), snapshots=[(0, model)]))
    key = section.data["layers"][0]["key"]
    assert key["overlap"] == key["canonical_overlap"] == [None] * 4
    assert key["canonical_residual_norm"] == key["residual_norm"] == [0.0] * 4


def test_geometry_beside_a_model_of_another_shape():
    """Compares norms only; layers without residuals or values are left out."""
    rng = np.random.default_rng(0)
    parts = geometry.BaseAndResiduals(rng.normal(size=(9, 1, 4)), rng.normal(size=(9, 3, 4)), 2)
    one = measurements._part(parts, rng.normal(size=(9, 2, 4)), None)
    assert "beside_best_overlap" not in one.values and len(one.values["beside_norm"]) == 2
    same = measurements._part(parts, rng.normal(size=(9, 3, 4)), None)
    assert "beside_best_overlap" in same.values
    layers = [dict(key=one), dict(key=measurements.PartMeasurements({}), value=one)]
    angles = geometry_report._angle_figure([*layers, dict(key=one)]).alternative
    assert [name in angles for name in ("layer 0", "layer 1", "layer 2")] == [True, False, True]
    assert [row[0] for row in geometry_report._table(layers, "value", True).rows] == [1]


def test_mechanisms_are_named_once():
    found = words.mechanism_names(workdirs.MODELS["lrkv_by_layer"][1])
    assert found.split("; ")[1] == "GQA, 2 KV heads"
    assert words.mechanism_names([grouped(4, 4)] * 3) == "MHA"


def test_reports_are_as_before(monkeypatch):
    """Compares sections of an LRKV model, beside GQA and after an earlier step, with files."""
    golden.note_drawings(monkeypatch)
    model = _made(grouped(2, 1, 3), 1)
    request = Request(
        {}, (), _made(grouped(2, 2), 2), [(10, _made(grouped(2, 1, 3), 3)), (20, model)]
    )
    for report in REPORTS.values():
        golden.check(report.section(model, request))
