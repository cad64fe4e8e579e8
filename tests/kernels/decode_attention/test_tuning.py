"""Tile sizes from tuned.json: the entry that is taken, and the default if none can be used."""

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
    """A function of tuned.json's content, JSON-able or text."""
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")
    tuning._read.cache_clear()
    logs.log_once.cache_clear()

    def write(content):
        text = content if isinstance(content, str) else json.dumps(content)
        tuning.FILE.write_text(text)

    yield write
    tuning._read.cache_clear()


def _entry(tile_kv):
    return dict(parameters=dict(tile_kv=tile_kv), source="measured")


def _key(batch, length):
    return f"tpu/residual_rotated_normed/bfloat16-N18-K18-J1-R64-H128-V128-B{batch}-S{length}"


def test_a_tuned_parameter_takes_the_defaults_place(write, caplog):
    write({KIND: {KEY: _entry(256)}, "TPU v8": {KEY: _entry(512)}})
    with caplog.at_level(logging.INFO):
        assert tuning.parameters(KEY, KIND, default=DEFAULT) == dict(tile_kv=256, splits=1)
    assert not caplog.records


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
    expected = DEFAULT if tile_kv is None else DEFAULT | dict(tile_kv=tile_kv)
    assert tuning.parameters(_key(batch, length), KIND, default=DEFAULT) == expected


def test_entries_of_other_sizes_are_not_taken(write):
    write({KIND: {KEY: _entry(256)}})
    for other in (KEY.replace("R64", "R32"), KEY.replace("tpu/", "gpu/"), "tpu/x"):
        assert tuning.parameters(other, KIND, default=DEFAULT) == DEFAULT


@pytest.mark.parametrize(
    "content, said",
    [
        ({}, "not tuned"),
        ({"TPU v8": {KEY: _entry(256)}}, "not tuned"),
        ("{", "cannot be read"),
        (None, "cannot be read"),
        ([KEY], "not a table"),
        ({KIND: [KEY]}, "not a table"),
        ({KIND: {KEY: 256}}, "no parameters"),
        ({KIND: {KEY: dict(tile_kv=256)}}, "no parameters"),
        ({KIND: {KEY: dict(parameters={})}}, "no parameters"),
        ({KIND: {KEY: dict(parameters=dict(tiles=256))}}, "'tiles', which is none of tile_kv"),
        ({KIND: {KEY: _entry(0)}}, "tile_kv = 0"),
        ({KIND: {KEY: _entry(-128)}}, "tile_kv = -128"),
        ({KIND: {KEY: _entry(256.0)}}, "tile_kv = 256.0"),
        ({KIND: {KEY: _entry(True)}}, "tile_kv = True"),
        ({KIND: {KEY: _entry("256")}}, "tile_kv = '256'"),
    ],
)
def test_without_a_usable_entry_the_default_and_one_line(write, caplog, content, said):
    if content is not None:  # None: no file
        write(content)
    with caplog.at_level(logging.INFO):
        found = [tuning.parameters(KEY, KIND, default=DEFAULT) for _ in range(3)]
    assert found == [DEFAULT] * 3
    (record,) = caplog.records
    assert said in record.getMessage() and KEY in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.levelno == (logging.INFO if said == "not tuned" else logging.WARNING)


def test_the_default_is_copied(write):
    write({})
    tuning.parameters(KEY, KIND, default=DEFAULT)["tile_kv"] = 1
    assert DEFAULT["tile_kv"] == 1024


def test_the_device_compiled_for_comes_before_the_one_present(write):
    write({KIND: {KEY: _entry(256)}, "cpu": {KEY: _entry(512)}})

    def found():
        return tuning.parameters(KEY, default=DEFAULT)["tile_kv"]

    assert (tuning.current_device_kind(), found()) == ("cpu", 512)
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert (tuning.current_device_kind(), found()) == (KIND, 256)


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


def test_only_the_very_batch_and_length(write):
    """Some parameters do not carry over to other sizes."""
    write({KIND: {KEY: _entry(256)}})

    def found(key):
        return tuning.parameters(key, KIND, default=DEFAULT, nearest=False)["tile_kv"]

    assert (found(KEY), found(_key(8, 65_536))) == (256, DEFAULT["tile_kv"])


@pytest.mark.parametrize("tile_kv", [1, 64, 100_000])
def test_impossible_tiles_are_rounded(write, tile_kv):
    """To a divisor of the capacity, in whole lanes."""
    inputs, cache = shapes.abstract(
        shapes.SHAPES["d12"]["mha"], batch=1, length=384, dtype=jnp.bfloat16
    )
    key = tuning.key("tpu", inputs, cache)
    write({tuning.current_device_kind(): {key: _entry(tile_kv)}})
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    run = functools.partial(tpu.decode_attention, interpret=True)
    assert jax.eval_shape(run, inputs, cache, first_B).shape == (1, 1, 6, 128)


def test_what_is_saved_is_found(write):
    write({"comment": "kept"})
    tuning.save(KEY, KIND, dict(tile_kv=256), source="static", bundles=3.5)
    assert tuning.parameters(KEY, KIND, default=DEFAULT)["tile_kv"] == 256
    tuning.save(KEY, KIND, dict(tile_kv=512), source="measured")
    assert tuning.parameters(KEY, KIND, default=DEFAULT)["tile_kv"] == 512
    content = json.loads(tuning.FILE.read_text())
    assert content == {"comment": "kept", KIND: {KEY: _entry(512)}}
    with pytest.raises(ValueError, match="source = 'guessed': must be one of measured, static"):
        tuning.save(KEY, KIND, dict(tile_kv=512), source="guessed")


def test_the_entries_kept_in_the_repository():
    content = json.loads(tuning.FILE.read_text())
    assert content.pop("comment")
    for kind, entries in content.items():
        assert kind.startswith(("TPU ", "NVIDIA "))
        for key, entry in entries.items():
            assert tuning._split(key)[1:] != (0, 0)
            assert entry["source"] in tuning.SOURCES
            assert tuning._checked(entry, entry["parameters"])


@pytest.mark.parametrize(
    "kernel, module, entry",
    [(tpu, tpu, dict(tile_kv=256, score_tile=128, splits=2)), (gpu, gpu.kernel, dict(split=256))],
)
def test_the_kernels_take_what_was_tuned(write, monkeypatch, kernel, module, entry):
    """The caller's parameters take precedence."""
    shape = shapes.SHAPES["d12"]["mha"]
    inputs, cache = shapes.abstract(shape, batch=1, length=1024, dtype=jnp.bfloat16)
    key = tuning.key(kernel.__name__.split(".")[-2], inputs, cache)
    kind = tuning.current_device_kind()
    write({kind: {key: dict(parameters=entry, source="measured")}})
    taken = []

    class Enough(Exception):
        pass

    def attend(*arrays, **options):
        taken.append({name: options[name] for name in entry})
        raise Enough

    monkeypatch.setattr(module, "attend", attend)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    for said in ({}, {name: 2 * value for name, value in entry.items()}):
        run = functools.partial(kernel.decode_attention, **said)
        with pytest.raises(Enough):
            jax.eval_shape(run, inputs, cache, first_B)
    assert taken == [entry, {name: 2 * value for name, value in entry.items()}]
