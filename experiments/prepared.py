"""Programs compiled on one machine for another: serialised XLA executables in a folder.

`index.json` has each program's file, size, digest and seconds of compilation, or the reason why it
does not compile there. A program is loaded if JAX's version and the sources are those it was
compiled with; otherwise whoever needs it compiles it.

Loading runs code from the folder: load only what you have made yourself.
"""

from collections.abc import Hashable, Mapping
import hashlib
import json
import lzma
import pathlib
import pickle
import time

import jax
from jax.experimental import serialize_executable

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
    """Returns a digest of all Python files that may change a program."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Folder:
    """A folder of programs for one device.

    Attributes:
      reasons: why a program was not loaded, by name.
    """

    def __init__(self, path: pathlib.Path, source: str):
        self.path, self._source = path, source
        self.reasons: dict[str, str] = {}
        index = path / _INDEX
        try:
            self._index = json.loads(index.read_text()) if index.exists() else {}
        except ValueError as error:
            raise UserError(f"{index}: not JSON: delete the folder ({error})") from error

    def add(self, key: Hashable, program: Program, device: jax.Device | None, **options) -> dict:
        """Compiles a program and stores it; returns its entry of the index.

        Args:
          device: of a topology; None: the device present.
          options: XLA's, for this program.
        """
        name, start = name_of(key), time.monotonic()
        known = self._index.get(name, {})
        if "file" in known and known["source"] == self._source:
            return known
        try:
            lowered = _lowered(program, device)
            with gpu_static.without_compilation_cache():
                compiled = lowered.compile(compiler_options=options or None)
            data = lzma.compress(pickle.dumps(serialize_executable.serialize(compiled)), preset=1)
        except Exception as error:  # other programs are made nevertheless
            entry = dict(why=f"{type(error).__name__}: {first_line(error)}")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            file = f"{name}.xc"
            (self.path / file).write_bytes(data)
            entry = dict(file=file, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        entry |= dict(seconds=round(time.monotonic() - start, 1))
        self._index[name] = entry | dict(source=self._source, jax=jax.__version__)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _INDEX).write_text(json.dumps(self._index, indent=1))
        return self._index[name]

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """Returns a stored program; None, with the reason in `reasons`, if it cannot be used."""
        name = name_of(key)
        try:
            return self._load(self._index.get(name))
        except Exception as error:  # of a file, a version, or XLA's check of the device
            self.reasons[name] = first_line(error)
            return None

    def _load(self, entry: Mapping | None) -> jax.stages.Compiled:
        if entry is None:
            raise ValueError("it was not prepared")
        if "why" in entry:
            raise ValueError(f"it did not compile before: {entry['why']}")
        if (entry["source"], entry["jax"]) != (self._source, jax.__version__):
            raise ValueError(f"prepared from other sources, or by JAX {entry['jax']}")
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
