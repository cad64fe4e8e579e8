"""Folders of safetensors, which get their name only when they are complete."""

import json
import tracemalloc

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from kvjax.convert import into_folder, into_workdir
from kvjax.convert.into_folder import ExportPlan, LazyTensor
from kvjax.foundation.errors import UserError


def _plan(**shapes):
    """Returns a plan of constant tensors: 0 in the first, 1 in the second and so on."""
    tensors = {
        name: LazyTensor(shape, lambda i=i, shape=shape: np.full(shape, i, np.float32))
        for i, (name, shape) in enumerate(shapes.items())
    }
    return ExportPlan("a plan", None, tensors, {"config.json": "{}\n"})


def test_shards(tmp_path):
    """No file exceeds the maximum but that of a single larger tensor."""
    plan = _plan(a=(2, 3), b=(4,), c=(100,), d=(1,), e=(3, 3))
    out = into_workdir.check(str(tmp_path / "out"))
    into_folder.write(plan, out, "F32", shard_bytes=40)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (6 + 4 + 100 + 1 + 9)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == dict(a=files[0], b=files[0], c=files[1], d=files[2], e=files[2])
    for file in files:
        assert int.from_bytes((out / file).read_bytes()[:8], "little") % 8 == 0
    for i, (name, file) in enumerate(index["weight_map"].items()):
        with safetensors.safe_open(out / file, framework="numpy") as opened:
            metadata = opened.metadata()
            assert metadata["format"] == "pt" and len(metadata) == 1 + len(opened.keys())
            np.testing.assert_array_equal(opened.get_tensor(name), plan.tensors[name].read())
            assert (opened.get_tensor(name) == i).all()
    into_folder.write(plan, tmp_path / "one", "F32")
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    assert load_file(tmp_path / "one/model.safetensors").keys() == plan.tensors.keys()


def test_one_tensor_is_in_memory(tmp_path):
    plan = _plan(**{f"t{i}": (1 << 18,) for i in range(20)})  # 1 MiB each
    tracemalloc.start()
    try:
        into_folder.write(plan, into_workdir.check(str(tmp_path / "out")), "BF16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


def test_failed_writes_leave_nothing(tmp_path, monkeypatch):
    """Covers an error, an interruption, and a full disk."""
    for error in (RuntimeError, KeyboardInterrupt, OSError(28, "No space left on device")):
        plan = _plan(a=(2,), b=(2,))

        def fail(error=error):
            assert not (tmp_path / "out").exists()
            raise error

        plan.tensors["b"] = LazyTensor((2,), fail)
        full = isinstance(error, OSError)
        with pytest.raises(UserError if full else error) as raised:
            into_folder.write(plan, into_workdir.check(str(tmp_path / "out")), "F32")
        assert not full or "No space left on device; nothing is left there" in str(raised.value)
        assert not list(tmp_path.iterdir())


def test_conversions_at_once_leave_each_other_alone(tmp_path):
    first, second = (into_workdir.check(str(tmp_path / name)) for name in ("first", "second"))
    killed = into_workdir._staging(first)
    killed.mkdir()  # of a killed conversion: no process locks it
    (killed / "weights").write_text("some")

    def other():
        into_folder.write(_plan(a=(2,)), second, "F32")
        return np.ones(2, np.float32)

    into_folder.write(ExportPlan("", None, {"b": LazyTensor((2,), other)}, {}), first, "F32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
