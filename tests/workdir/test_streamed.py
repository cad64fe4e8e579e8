"""Parameters written slice by slice form a checkpoint like training's, or none at all."""

import errno
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.workdir import checkpoint, storage, streamed
from kvjax.workdir.checkpoint import Checkpoints, read_parameters

QUERY = ("segments", 0, "attention", "mechanism", "query")
SMALL_CHUNKS = 512  # bytes: less than most arrays below


@pytest.fixture
def shapes(make_mechanism):
    """Abstract parameters of two layer groups; matrices in bfloat16, gains in float32."""
    block = BlockConfig(num_layers=5, d_model=16, mlp_dim=24, norm_gain=True)
    mechanisms = (make_mechanism("lrkv"),) * 3 + (make_mechanism("mla"),) * 2
    config = TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=32)

    def is_gain(x):
        return math.prod(x.shape) <= 3 * 16

    def dtype(x):
        return jnp.float32 if is_gain(x) else jnp.bfloat16

    abstract = parameters.abstract(config).shapes
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x)), abstract)


@pytest.fixture
def params(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), x.dtype), shapes)


@pytest.fixture
def small_chunks(monkeypatch):
    """Splits arrays into several chunks."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", SMALL_CHUNKS)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", SMALL_CHUNKS)
    monkeypatch.setattr(streamed, "LEAST_CHUNK_BYTES", 16)


def slices(params) -> list[tuple]:
    """Returns arguments of `write`, with layers from last to first."""
    order = []
    for path, array in jax.tree.leaves_with_path(params):
        keys = tuple(getattr(key, "key", None) for key in path)
        indices = range(len(array)) if keys[0] == "segments" else [None]
        order += [(-1 if i is None else i, keys, array, i) for i in indices]
    return [
        write_order[1:] for write_order in sorted(order, key=lambda write_order: -write_order[0])
    ]


def write_all(write, params, without=()):
    buffer = {}
    for keys, array, index in slices(params):
        if (keys, index) in without:
            continue
        values = array if index is None else array[index]
        memory = buffer.setdefault((values.shape, values.dtype), np.empty_like(values))
        memory[...] = values
        write(keys, memory, index=index)
        memory[...] = 0


def save_streamed(folder, params, step=0):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    with streamed.writing(folder, step=step, shapes=abstract) as write:
        write_all(write, params)


def placed(params, dtype=None):
    """Abstract parameters for `read_parameters`."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

    return jax.tree.map(place, params)


def assert_loads(folder, params, step=0):
    loaded = read_parameters(folder, step, placed(params))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(params)]


def files(folder: pathlib.Path) -> list[str]:
    """Returns names of files; those of data files are random and shown as *."""
    names = [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()]
    return sorted({"d/*".join((n.partition("d/")[0], "")) if "d/" in n else n for n in names})


def stored_arrays(step_folder) -> dict[str, dict]:
    """Returns the Zarr metadata of each array."""
    base = dict(driver="file", path=f"{step_folder}/state/")
    store = tensorstore.KvStore.open(dict(driver="ocdbt", base=base)).result()
    keys = [key.decode() for key in store.list().result()]

    def read(key):
        return json.loads(store.read(key).result().value)

    return {k.removesuffix("/zarr.json"): read(k) for k in keys if k.endswith("/zarr.json")}


def test_written_parameters_load(tmp_path, params):
    step = 70
    folder = epath.Path(tmp_path) / "not there [1]*{x}?" / "checkpoints"
    save_streamed(folder, params, step)
    assert storage.steps(folder) == [step]
    assert_loads(folder, params, step)
    wide = read_parameters(folder, step, placed(params, jnp.float32))

    def equal(got, want):
        return np.testing.assert_array_equal(got, np.asarray(want, np.float32))

    jax.tree.map(equal, wide, params)


def test_arrays_of_several_chunks_load(tmp_path, params, small_chunks, monkeypatch):
    """Bytes in flight stay below their limit."""
    monkeypatch.setattr(streamed, "IN_FLIGHT_BYTES", 2 * SMALL_CHUNKS)
    in_flight, put = [], streamed._Arrays._put

    def put_watched(arrays, *args):
        put(arrays, *args)
        assert arrays._in_flight_bytes == sum(size for size, _ in arrays._in_flight)
        in_flight.append(arrays._in_flight_bytes)

    monkeypatch.setattr(streamed._Arrays, "_put", put_watched)
    save_streamed(epath.Path(tmp_path), params)
    assert SMALL_CHUNKS < max(in_flight) <= 2 * SMALL_CHUNKS
    assert_loads(epath.Path(tmp_path), params)


def test_arrays_on_a_device_are_taken(tmp_path):
    params = dict(w=jnp.arange(6.0).reshape(2, 3), b=jnp.ones(2, jnp.bfloat16))
    folder = epath.Path(tmp_path)
    with streamed.writing(folder, shapes=params) as write:  # only shapes and dtypes are read
        write(("w",), params["w"][1], index=1)
        write(("b",), params["b"])
        write(("w",), params["w"].T[:, :1].ravel(), index=0)
    assert_loads(folder, params)


@pytest.mark.parametrize("chunks", ["one", "several"])
def test_the_layout_is_that_of_training(tmp_path, params, chunks, request):
    """Files and metadata are training's; arrays larger than a chunk have one layer per chunk."""
    if chunks == "several":
        request.getfixturevalue("small_chunks")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_streamed(epath.Path(ours), params, step=3)
    checkpoints = Checkpoints(epath.Path(theirs), keep=1)
    state = dict(params=jax.tree.map(jnp.asarray, params), step=jnp.int32(3))
    checkpoints.save(3, state, position=0)
    checkpoints.close()
    written, expected = stored_arrays(ours / "3"), stored_arrays(theirs / "3")
    sliced = []
    for name, metadata in expected.items():
        chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        bytes_of = math.prod(metadata["shape"]) * jnp.dtype(metadata["data_type"]).itemsize
        if name.startswith("params.segments") and bytes_of > checkpoint.CHUNK_BYTES:
            sliced.append(name)
            chunk[0] = 1
            metadata["codecs"][0]["configuration"]["chunk_shape"][0] = 1
    assert written == expected and bool(sliced) == (chunks == "several")
    in_item = [f for f in files(theirs / "3" / "state") if f != "commit_success.txt"]
    assert files(ours / "3" / "state") == in_item

    def read(folder, name):
        return json.loads((folder / "3" / name).read_text())

    assert read(ours, "state/_sharding") == read(theirs, "state/_sharding")
    if chunks == "one":
        for name in ("state/_METADATA", "state/array_metadatas/process_0"):
            assert read(ours, name) == read(theirs, name)
    written, expected = (read(folder, "_CHECKPOINT_METADATA") for folder in (ours, theirs))
    assert written.keys() == expected.keys()
    assert written["item_handlers"] == dict(state=expected["item_handlers"]["state"])
    assert 0 < written["init_timestamp_nsecs"] < written["commit_timestamp_nsecs"]


@pytest.mark.filterwarnings("ignore:coroutine")
def test_flipped_bits_are_noticed_or_harmless(tmp_path):
    """A flipped bit in any file raises, except in a few bytes of a superseded index."""
    folder, rng = epath.Path(tmp_path), np.random.default_rng(0)
    layers = dict(w=rng.standard_normal((2, 192, 128), np.float32), b=np.ones((2, 3), jnp.bfloat16))
    params = dict(segments={0: layers}, head=rng.standard_normal((128, 192), np.float32))
    save_streamed(folder, params)
    paths = sorted(path for path in (tmp_path / "0").rglob("*") if path.is_file())
    weights = max(paths, key=lambda path: path.stat().st_size)
    noticed = []
    for path in [*paths, *[weights] * 20]:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert_loads(folder, params)
        except UserError as error:
            assert f"{folder}/0 cannot be read" in str(error)
            noticed.append(path)
        path.write_bytes(content)
    assert noticed.count(weights) > 18 and len(set(noticed)) >= 3
    assert_loads(folder, params)


def test_missing_arrays_and_slices_are_named(tmp_path, params, shapes):
    """The message lists eight of them, and counts the others."""
    query = rf"params\.{'.'.join(map(str, QUERY))}"
    for without, message in (
        ([(QUERY, i) for i in range(3)], rf"{query}$"),
        ([(("embedding",), None), (QUERY, 0)], rf"params\.embedding, {query}\[0\]$"),
        (None, r"(params\.[^,]*, ){7}params\.[^,]* and \d+ more$"),
    ):
        with pytest.raises(ValueError, match="^not written: " + message):
            with streamed.writing(epath.Path(tmp_path), shapes=shapes) as write:
                if without:
                    write_all(write, params, without)
        assert not list(tmp_path.iterdir())


QUERY_SHAPE = (16, 4, 8)


@pytest.mark.parametrize(
    "keys, shape, dtype, index, message",
    [
        (QUERY, QUERY_SHAPE, jnp.bfloat16, 2, r"query\[2\] was written before"),
        (QUERY, (3, *QUERY_SHAPE), jnp.bfloat16, None, "query was written before"),
        (QUERY, QUERY_SHAPE, jnp.float32, 1, r"query\[1\] is float32 \(16, 4, 8\): must"),
        (QUERY, (16, 8, 4), jnp.bfloat16, 1, r"query\[1\] is .*: must be bfloat16 \(16, 4, 8\)"),
        (("embedding",), (32, 15), jnp.bfloat16, None, r"embedding is bfloat16 \(32, 15\)"),
        (("step",), (), jnp.int32, None, r"params\.step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_arrays_are_refused(tmp_path, shapes, keys, shape, dtype, index, message):
    with pytest.raises((ValueError, KeyError), match=message):
        with streamed.writing(epath.Path(tmp_path), shapes=shapes) as write:
            write(QUERY, np.zeros(QUERY_SHAPE, jnp.bfloat16), index=2)
            write(keys, np.zeros(shape, dtype), index=index)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("of the source"), KeyboardInterrupt()], ids=repr)
def test_an_exception_leaves_nothing(tmp_path, params, shapes, error, small_chunks):
    """Writes in flight are abandoned."""
    with pytest.raises(type(error)) as caught:
        with streamed.writing(epath.Path(tmp_path), shapes=shapes) as write:
            write_all(write, params)
            raise error
    assert caught.value is error and not list(tmp_path.iterdir())
    save_streamed(epath.Path(tmp_path), params)


def test_nothing_is_overwritten(tmp_path, params):
    folder = epath.Path(tmp_path)
    save_streamed(folder, params)
    with pytest.raises(UserError, match=f"^{folder}/0 exists already"):
        save_streamed(folder, jax.tree.map(np.zeros_like, params))
    assert_loads(folder, params)
    save_streamed(folder, params, step=1)
    assert storage.steps(folder) == [0, 1]


KILLED = """
import os, signal, sys
from unittest import mock
from etils import epath
import numpy as np
from kvjax.workdir import streamed
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
w = np.ones((2, 3), np.float32)
with mock.patch.object(streamed, "_write_metadata", die):
    with streamed.writing(epath.Path(sys.argv[1]), shapes=dict(w=w)) as write:
        write(("w",), w)
"""


def test_a_kill_leaves_no_checkpoint(tmp_path, params):
    folder = epath.Path(tmp_path)
    child = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=ROOT)
    assert child.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "state" / "_METADATA").exists()  # it was nearly complete
    assert storage.steps(folder) == []
    save_streamed(folder, params)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert_loads(folder, params)


@pytest.mark.parametrize("limit", [1 << 10, 1 << 18], ids=["at once", "later"])
@pytest.mark.parametrize("in_flight", [0, 1 << 26], ids=["in the block", "at its end"])
def test_a_full_disk_is_one_message(tmp_path, monkeypatch, limit, in_flight):
    """A limit on file sizes stands for the full disk."""
    monkeypatch.setattr(streamed, "IN_FLIGHT_BYTES", in_flight)
    rng = np.random.default_rng(0)
    params = dict(v=np.ones(3, np.float32), w=rng.standard_normal((1 << 10, 1 << 8), np.float32))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(OSError, match=r"^checkpoint of step 7 was not written: ") as caught:
            with streamed.writing(epath.Path(tmp_path), step=7, shapes=params) as write:
                write(("w",), params["w"])
                write(("v",), params["v"])
                assert in_flight, "the block went on"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.strerror(errno.EFBIG) in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    save_streamed(epath.Path(tmp_path), params, step=7)
    assert_loads(epath.Path(tmp_path), params, step=7)


def test_in_a_bucket_a_file_marks_a_complete_checkpoint(bucket, monkeypatch, params, shapes):
    """Orbax's own checkpoints have a commit file too; here a disk stands for the bucket."""

    def path(url):
        return str(bucket / url.removeprefix("gs://"))

    gcs = streamed.tensorstore_utils.gcs_utils
    monkeypatch.setattr(gcs, "get_kvstore_for_gcs", lambda url: dict(driver="file", path=path(url)))
    monkeypatch.setattr(gcs, "is_hierarchical_namespace_enabled", lambda path: False)
    (bucket / "runs").mkdir()
    folder = epath.Path("gs://runs/one")
    with pytest.raises(KeyError):
        with streamed.writing(folder, shapes=shapes) as write:
            write_all(write, params)
            raise KeyError
    assert not (bucket / "runs" / "one" / "0").exists()
    (bucket / "runs" / "one" / "0" / "state").mkdir(parents=True)  # of a process that was killed
    (bucket / "runs" / "one" / "0" / "state" / "left").write_text("")
    with streamed.writing(folder, shapes=shapes) as write:
        write_all(write, params)
        assert storage.steps(folder) == []
    assert storage.steps(folder) == [0]
    names = files(bucket / "runs" / "one" / "0")
    assert "commit_success.txt" in names and "state/left" not in names
    assert_loads(epath.Path(bucket) / "runs" / "one", params)
    with pytest.raises(UserError, match="gs://runs/one/0 exists already"):
        save_streamed(folder, params)
    assert_loads(epath.Path(bucket) / "runs" / "one", params)
