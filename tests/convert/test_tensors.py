"""Safetensors of a folder: headers at once, data later, and errors for damaged ones."""

import json
import os

from etils import epath
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.convert import tensors
from kvjax.foundation.errors import UserError

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)

    def draw(shape, dtype):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "a": draw((3, 4), np.float32),
        "b": draw((5,), np.float16),
        "c.weight": draw((2, 3, 2), ml_dtypes.bfloat16),
    }


def shard(folder, arrays, index=None):
    """Writes the first array and the others into a shard each, and an index."""
    (first, array), *others = arrays.items()
    save_file({first: array}, folder / SHARDS[0])
    save_file(dict(others), folder / SHARDS[1])
    index = index or {name: SHARDS[int(name != first)] for name in arrays}
    (folder / INDEX).write_text(json.dumps(dict(weight_map=index)))


def open_folder(folder):
    return tensors.open_folder(epath.Path(folder))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_as_they_were_saved(tmp_path, arrays, sharded):
    if sharded:
        shard(tmp_path, arrays)
    else:
        save_file(arrays, tmp_path / "model.safetensors")
    found = open_folder(tmp_path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        stored = found[name]
        assert stored.shape == array.shape and tensors.DTYPES[stored.dtype] == array.dtype
        read = stored.read()
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)
    assert (found["a"].path != found["b"].path) == sharded


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_counted(tmp_path, dtype):
    """The largest values are finite."""
    array = np.full(2009, ml_dtypes.finfo(dtype).max, dtype)
    array[1::2] *= -1
    path = tmp_path / "model.safetensors"
    save_file(dict(weights=array, mask=np.full(3, -np.inf, dtype)), path)
    np.testing.assert_array_equal(open_folder(tmp_path)["weights"].read(), array)
    array[[0, 5, -1]] = np.nan, -np.inf, np.inf
    save_file(dict(weights=array.reshape(-1, 1)), path)
    with pytest.raises(UserError) as error:
        open_folder(tmp_path)["weights"].read()
    said = f"{path}: weights has 3 of {len(array):,} values that are not finite: download"
    assert said in str(error.value)


def test_a_dtype_that_holds_all(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors")
    a, b, c = open_folder(tmp_path).values()
    assert tensors.dtype_of([b, b]) == np.float16 and tensors.dtype_of([c]) == ml_dtypes.bfloat16
    assert tensors.dtype_of([b, c]) == np.float32 and tensors.dtype_of([a, c]) == np.float32


def test_data_are_read_when_asked_for(tmp_path):
    """A tensor of 64 GiB, a hole in a sparse file, is not read."""
    bytes_per, elements = 4, 1 << 34
    header = dict(a=dict(dtype="F32", shape=[2], data_offsets=[0, 8]))
    end = 8 + bytes_per * elements
    header["hole"] = dict(dtype="F32", shape=[1 << 17, 1 << 17], data_offsets=[8, end])
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + np.float32([1, 2]).tobytes())
        file.truncate(8 + len(text) + end)
    found = open_folder(tmp_path)
    assert found["hole"].shape == (1 << 17, 1 << 17)
    np.testing.assert_array_equal(found["a"].read(), [1, 2])


def test_shards_that_are_missing_or_cut_off_are_all_named(tmp_path, arrays):
    shard(tmp_path, arrays, {"a": SHARDS[0], "b": SHARDS[1], "x": "other.safetensors"})
    (tmp_path / SHARDS[0]).unlink()
    os.truncate(tmp_path / SHARDS[1], (tmp_path / SHARDS[1]).stat().st_size - 1)
    with pytest.raises(UserError) as error:
        open_folder(tmp_path)
    assert f"lacks {SHARDS[0]}, other.safetensors" in str(error.value)
    assert f"damaged files: {SHARDS[1]} (" in str(error.value)
    assert str(error.value).endswith("download these files again")


@pytest.mark.parametrize("size", [0, 7, 20, -1])
def test_a_file_that_is_cut_off_anywhere(tmp_path, arrays, size):
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    os.truncate(path, size % path.stat().st_size)
    with pytest.raises(UserError, match="has damaged files: model.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "index, said",
    [
        (
            {"a": SHARDS[0], "b": SHARDS[1], "c.weight": SHARDS[1], "d": SHARDS[1]},
            f"{INDEX} lists tensors in the wrong files: d ({SHARDS[1]})",
        ),
        (
            {"a": SHARDS[1], "b": SHARDS[1], "c.weight": SHARDS[0]},
            f"lists tensors in the wrong files: a ({SHARDS[1]}), c.weight ({SHARDS[0]})",
        ),
        ({"a": SHARDS[0], "b": SHARDS[1]}, f"{INDEX} lacks: c.weight ({SHARDS[1]})"),
        ({"a": f"../{SHARDS[0]}"}, "weight_map must give a file beside it for every tensor"),
        ({"a": 3}, "weight_map must give a file beside it"),
        ({"a": ".."}, "weight_map must give a file beside it"),
    ],
)
def test_an_index_of_other_files(tmp_path, arrays, index, said):
    shard(tmp_path, arrays, index)
    with pytest.raises(UserError) as error:
        open_folder(tmp_path)
    assert said in str(error.value)


def test_an_index_without_files(tmp_path, arrays):
    shard(tmp_path, arrays)
    for text, said in (("{", "is not JSON"), ("{}", "weight_map must")):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(UserError, match=f"{INDEX}:? {said}"):
            open_folder(tmp_path)


def test_a_folder_without_safetensors(tmp_path):
    for others in ("none", "pytorch_model.bin"):
        with pytest.raises(UserError) as error:
            open_folder(tmp_path)
        assert f"(other weights: {others}): download these" in str(error.value)
        (tmp_path / "pytorch_model.bin").touch()
