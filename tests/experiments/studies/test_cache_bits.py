"""The study of caches at equal bytes, on runs whose bits per byte are given."""

import json

import pytest

from experiments.benchmarks import quantized
from experiments.benchmarks.quantized import Cache
from experiments.studies import cache_bits
from experiments.studies.grid import Run
from kvjax.cache import cache as cache_lib
from kvjax.foundation import command_line

SEEDS = (0.0, 0.3, 0.5)  # a seed's offset, for all mechanisms and caches
WORSE = {"int8": 0.01, "int4": 0.1}
OF_PART = {"key": 0.75, "value": 0.25}


@pytest.fixture
def run(trained, capsys, monkeypatch):
    """Returns a function from options to the result."""
    trained.bpb = lambda run: 2.0

    def bits_per_byte(workdir):
        name, seed, _ = workdir.name.rsplit("_", 2)
        base = {"mha": 2.0, "lrkv": 1.9}[name] + SEEDS[int(seed[-1])]

        def bits(cache):
            part = OF_PART.get(cache.part, 1) * (2 if cache.basis else 1)
            return base + part * WORSE.get(cache.dtype, 0)

        caches = {
            cache_bits._name(c): dict(bits_per_byte=bits(c), same_token=0.5)
            for c in cache_bits._CACHES
        }
        return dict(caches=caches)

    monkeypatch.setattr(cache_bits, "bits_per_byte", bits_per_byte)

    def run(*options):
        status = command_line.status(cache_bits.main, ["--mechanisms=mha,lrkv", *options])
        output = capsys.readouterr()
        assert status == 0, output.err
        return json.loads(output.out)

    return run


def test_differences_are_taken_seed_by_seed(run):
    found = run("--json")
    rows = {(row["mechanism"], row["cache_dtype"]): row for row in found["rows"]}
    assert len(rows) == 6 and found["tokens"] == 256 * 8192
    sizes = [rows["mha", dtype]["cache_bytes"] for dtype in ("", "int8", "int4")]
    assert sizes == [2048, 4 * 2 * 4 * (32 + 4), 4 * 2 * 4 * (16 + 4)]
    for name, against in dict(mha=0, lrkv=-0.1).items():
        for dtype, worse in WORSE.items():
            row = rows[name, dtype]
            assert row["worse"] == pytest.approx(worse)
            assert row["against_mha"] == pytest.approx(against + worse)
            assert row["against_mha_half_interval"] == pytest.approx(0, abs=1e-9)
            assert row["bpb_half_interval"] > 0.5
    by_basis = {(row["mechanism"], row["basis"]): row for row in found["parts"]}
    assert by_basis["lrkv", ""]["key"] == pytest.approx(0.075)
    assert by_basis["lrkv", "stored"]["value"] == pytest.approx(0.05)


def test_a_part_of_the_fields_is_quantised():
    (cell,) = cache_bits.cells([cache_bits.THIN])
    model = Run(cell, 0, 1).experiment.model
    with quantized._only(Cache("int4", part="key")):
        sizes = dict(batch=1, capacity=128, dtype=quantized.F32, bits=4)
        layer = cache_lib.abstract(model.mechanisms, **sizes).layers[0]
    assert {name: str(array.dtype) for name, array in layer.items()} == {
        "base_key": "uint8",
        "base_key.scale": "float32",
        "base_value": "float32",
    }
