"""Tile sizes from tuned.json: the choice of an entry, and the default without one."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import pytest

from kvjax.foundation import logs
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.decode_attention.gpu import attention as gpu
from kvjax.kernels.decode_attention.tpu import attention as tpu

KIND = "TPU v9"
KEY = "tpu/residual_rotated_normed/bfloat16-N18-K18-J1-R64-H128-V128-B8-S32768"
DEFAULT = dict(tile_kv=1024, splits=1)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes tuned.json; the device compiled for is a `KIND`."""
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")
    monkeypatch.setattr(tuning, "current_device_kind", lambda: KIND)
    tuning._read.cache_clear()
    logs.log_once.cache_clear()
    yield lambda content: tuning.FILE.write_text(json.dumps(content))
    tuning._read.cache_clear()


def _entry(tile_kv):
    return dict(parameters=dict(tile_kv=tile_kv), source="measured")


def _key(batch, length):
    return f"tpu/residual_rotated_normed/bfloat16-N18-K18-J1-R64-H128-V128-B{batch}-S{length}"


def _tile_kv(key, nearest=True):
    parameters = tuning.parameters(key, default=DEFAULT, nearest=nearest)
    assert parameters.pop("splits") == DEFAULT["splits"]
    return parameters["tile_kv"]


@pytest.mark.parametrize(
    "batch, length, tile_kv",
    [
        (8, 32_768, 1),
        (8, 65_536, 1),
        (9, 32_767, 2),
        (8, 2048, 2),
        (63, 1 << 20, 1),
        (64, 1024, 3),
        (7, 32_768, None),  # not from larger batches
        (8, 1023, None),  # nor from longer caches
    ],
)
def test_the_nearest_smaller_batch_then_length(write, batch, length, tile_kv):
    entries = {_key(8, 32_768): 1, _key(8, 1024): 2, _key(64, 1024): 3}
    write({KIND: {key: _entry(n) for key, n in entries.items()}})
    key = _key(batch, length)
    assert _tile_kv(key) == (tile_kv or DEFAULT["tile_kv"])
    assert _tile_kv(key, nearest=False) == entries.get(key, DEFAULT["tile_kv"])


def test_the_default_without_an_entry_and_one_line(write, caplog):
    write({KIND: {KEY: _entry(256)}, "TPU v8": {_key(1, 1024): _entry(512)}})
    others = (_key(1, 1024), KEY.replace("R64", "R32"), KEY.replace("tpu/", "gpu/"))
    with caplog.at_level(logging.INFO):
        assert _tile_kv(KEY) == 256
        assert [_tile_kv(key) for key in (*others, *others)] == [1024] * 6
    assert [r.getMessage().partition(" on ")[0] for r in caplog.records] == list(others)


def test_the_device_compiled_for_comes_before_the_one_present():
    assert tuning.current_device_kind() == "cpu"
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert tuning.current_device_kind() == KIND


def test_keys():
    def key(name, **sizes):
        sizes = dict(batch=8, length=32_768, dtype=jnp.bfloat16) | sizes
        return tuning.key("tpu", *shapes.abstract(shapes.SHAPES["d36"][name], **sizes))

    assert key("lrkv") == KEY
    assert key("lrkv", dtype=jnp.float32) == KEY.replace("bfloat16", "float32")
    assert key("lrkv_no_norm") == KEY.replace("_normed", "")
    assert key("lrkv_no_rope") == KEY.replace("_rotated", "")
    assert key("lrkv", batch=1, length=1024) == _key(1, 1024)
    assert key("gqa") == "tpu/grouped/bfloat16-N18-K6-H128-V128-B8-S32768"
    assert key("thin_keys") == "tpu/grouped/bfloat16-N18-K18-H32-V128-B8-S32768"
    assert key("mla") == "tpu/latent/bfloat16-N18-C768-P64-B8-S32768"
    assert key("lrkv_gqa") == KEY.replace("K18", "K6")
    assert key("low_rank_keys") == "tpu/factored/bfloat16-N18-K6-J6-H64-V128-B8-S32768"
    assert key("gla") == "tpu/latent/bfloat16-N18-J2-C384-P64-B8-S32768"


@pytest.mark.parametrize("tile_kv", [1, 64, 100_000])
def test_impossible_tiles_are_rounded(write, tile_kv):
    """Rounded down to a divisor of the capacity, in whole lanes."""
    inputs, cache = shapes.abstract(
        shapes.SHAPES["d12"]["mha"], batch=1, length=384, dtype=jnp.bfloat16
    )
    key = tuning.key("tpu", inputs, cache)
    write({KIND: {key: _entry(tile_kv)}})
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    run = functools.partial(tpu.decode_attention, interpret=True)
    assert jax.eval_shape(run, inputs, cache, first_B).shape == (1, 1, 6, 128)


def test_saved_entries_are_found(write):
    write({"comment": "kept"})
    tuning.save(KEY, KIND, dict(tile_kv=256), source="static", bundles=3.5)
    assert _tile_kv(KEY) == 256
    tuning.save(KEY, KIND, dict(tile_kv=512), source="measured")
    assert _tile_kv(KEY) == 512
    content = json.loads(tuning.FILE.read_text())
    assert content == {"comment": "kept", KIND: {KEY: _entry(512)}}


def test_the_entries_kept_in_the_repository():
    content = json.loads(tuning.FILE.read_text())
    assert content.pop("comment")
    for kind, entries in content.items():
        assert kind.startswith(("TPU ", "NVIDIA "))
        for key, entry in entries.items():
            assert tuning._split(key) and entry["source"] in ("measured", "static")
            assert all(type(value) is int and value > 0 for value in entry["parameters"].values())


@pytest.mark.parametrize(
    "kernel, module, entry",
    [(tpu, tpu, dict(tile_kv=256, score_tile=128, splits=2)), (gpu, gpu.kernel, dict(split=256))],
)
def test_kernels_use_tuned_parameters(write, monkeypatch, kernel, module, entry):
    """The caller's parameters take precedence."""
    shape = shapes.SHAPES["d12"]["mha"]
    inputs, cache = shapes.abstract(shape, batch=1, length=1024, dtype=jnp.bfloat16)
    key = tuning.key(kernel.__name__.split(".")[-2], inputs, cache)
    write({KIND: {key: dict(parameters=entry, source="measured")}})
    used = []

    class Enough(Exception):
        pass

    def attend(*arrays, **options):
        used.append({name: options[name] for name in entry})
        raise Enough

    monkeypatch.setattr(module, "attend", attend)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    for given_options in ({}, {name: 2 * value for name, value in entry.items()}):
        run = functools.partial(kernel.decode_attention, **given_options)
        with pytest.raises(Enough):
            jax.eval_shape(run, inputs, cache, first_B)
    assert used == [entry, {name: 2 * value for name, value in entry.items()}]
