"""Serialised XLA executables in a folder, compiled on one machine to run on another.

`index.json` has each program's file, size, digest and seconds of compilation, or the reason why it
does not compile. A program can only be loaded with the sources, tuned tile sizes and version of JAX
that it was compiled with; otherwise the caller compiles it again.

Loading runs code from the folder: load only folders that you have made yourself.
"""

from collections.abc import Callable, Hashable, Mapping
import hashlib
import json
import lzma
import pathlib
import pickle
import time

from etils import epath
import jax
from jax.experimental import serialize_executable
import jaxlib

from kvjax.foundation import target
from kvjax.foundation.errors import UserError, first_line
from kvjax.hardware import topology
from kvjax.kernels.profile import gpu_static
from kvjax.kernels.profile.side_by_side import Program

_INDEX = "index.json"
_SOURCES = ("kvjax", "experiments")


def name_of(key: Hashable) -> str:
    """Returns a program's name from the parts of its key."""
    parts = key if isinstance(key, tuple) else (key,)
    return "-".join(str(part) or "definition" for part in parts)


def source_digest(root: pathlib.Path) -> str:
    """Returns a digest of the versions and files that may change a program."""
    digest = hashlib.sha256(f"{jax.__version__} {jaxlib.__version__}".encode())
    for folder in _SOURCES:
        files = {*(root / folder).rglob("*.py"), *(root / folder / "kernels").rglob("*.json")}
        for path in sorted(files):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Folder:
    """A folder of programs for one device.

    Args:
      source: the current `source_digest`.
      on_failure: called with a program's name and the reason if it cannot be loaded.
    """

    def __init__(
        self,
        path: pathlib.Path,
        source: str,
        on_failure: Callable[[str, str], None] = lambda name, why: None,
    ):
        self.path, self._source, self._on_failure = path, source, on_failure
        index = path / _INDEX
        try:
            self._index = json.loads(index.read_text()) if index.exists() else {}
        except ValueError as error:
            raise UserError(f"{index}: not JSON: delete the folder ({error})") from error

    def add(
        self, key: Hashable, make: Callable[[], Program], device: jax.Device | None, **options
    ) -> dict:
        """Compiles and stores a program unless the folder has it; returns its entry of the index.

        Args:
          make: returns the function and its arguments.
          device: a device of a topology; None: this machine's.
          options: XLA's options for this program.
        """
        name, start = name_of(key), time.monotonic()
        known = self._index.get(name, {})
        if known.get("source") == self._source and (self.path / known.get("file", "")).is_file():
            return known
        try:
            lowered = _lowered(make(), device)
            with gpu_static.without_compilation_cache():
                compiled = lowered.compile(compiler_options=options or None)
            data = lzma.compress(pickle.dumps(serialize_executable.serialize(compiled)), preset=1)
        except Exception as error:  # recorded, so that other programs are still compiled
            entry = dict(why=f"{type(error).__name__}: {first_line(error)}")
        else:
            file = f"{name}.xc"
            target.write(epath.Path(self.path), {file: data}, "--folder")
            entry = dict(file=file, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        entry |= dict(seconds=round(time.monotonic() - start, 1))
        self._index[name] = entry | dict(source=self._source)
        index = json.dumps(self._index, indent=1).encode()
        target.write(epath.Path(self.path), {_INDEX: index}, "--folder")
        return self._index[name]

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """Returns a stored program; calls `on_failure` and returns None if it cannot be used."""
        name = name_of(key)
        try:
            return self._load(self._index.get(name))
        except Exception as error:  # a damaged file, another version, or another device
            self._on_failure(name, first_line(error))
            return None

    def _load(self, entry: Mapping | None) -> jax.stages.Compiled:
        if entry is None:
            raise ValueError("it was not prepared")
        if "why" in entry:
            raise ValueError(f"it did not compile before: {entry['why']}")
        if entry["source"] != self._source:
            raise ValueError("it was compiled from other sources, or by another version of JAX")
        data = (self.path / entry["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['file']} is damaged")
        stored = pickle.loads(lzma.decompress(data))
        first = jax.devices()[:1]  # programs are for one device
        return serialize_executable.deserialize_and_load(*stored, execution_devices=first)


def _lowered(program: Program, device: jax.Device | None) -> jax.stages.Lowered:
    function, arguments = program
    if device is None:
        return function.lower(*arguments)
    return topology.lower_for(device, function, *arguments)
