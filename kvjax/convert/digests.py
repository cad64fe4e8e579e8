"""Digests that detect damaged weight files, of kvjax's exports and of downloads from a model hub.

An export stores the BLAKE2b of every tensor in its file's metadata, and that of every other file in
digests.json. The hub's client records a SHA-256 (Git's SHA-1 for small files): in its cache as the
name of the blob that a link points to, and in a folder as the download's etag.
"""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
import re

from etils import epath
import numpy as np

from kvjax.foundation import json_text, progress
from kvjax.foundation.errors import UserError

FILE = "digests.json"
_KEY = "blake2b"
_BYTES = 16
_DOWNLOADS = pathlib.Path(".cache/huggingface/download")
_CHUNK = 1 << 24  # bytes per read


# -- kvjax's own -----------------------------------------------------------------------------------


def key_of(tensor: str) -> str:
    """Returns the metadata key of a tensor's digest in a safetensors file."""
    return f"{_KEY}:{tensor}"


def of_array(array: np.ndarray) -> str:
    """Returns the digest of an array's bytes."""
    return _of_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def of_files(texts: Mapping[str, str]) -> str:
    """Returns the text of digests.json for file contents by name."""
    by_name = {name: _of_bytes(text.encode()) for name, text in texts.items()}
    return json.dumps({_KEY: by_name}, indent=1) + "\n"


def check_files(folder: epath.Path) -> None:
    """Raises a UserError if the folder has a digests.json from which a file differs."""
    path = folder / FILE
    if not path.exists():
        return
    advice = "copy the folder again, or remove this file if you edited the folder on purpose"
    digests = json_text.read_object(path, advice).get(_KEY)
    if not isinstance(digests, dict):
        raise UserError(f"{path} has no {_KEY}: {advice}")
    for name, digest in digests.items():
        file = folder / name
        if not file.exists() or _of_bytes(file.read_bytes()) != digest:
            problem = "differs from its digest in" if file.exists() else "is missing, but listed in"
            raise UserError(f"{file} {problem} {path.name}: {advice}")


def _of_bytes(content: bytes | np.ndarray) -> str:
    return hashlib.blake2b(content, digest_size=_BYTES).hexdigest()


# -- a hub's ---------------------------------------------------------------------------------------


def check_download(path: epath.Path) -> None:
    """Raises a UserError if the hub's digest of a file is known and differs."""
    digest, source = _of_download(pathlib.Path(path))
    if not digest:
        return
    with progress.waiting(f"checking the digest of {path.name}"):
        actual = _hash(path, git=len(digest) == 40)
    if actual != digest:
        raise UserError(
            f"{path} differs from the download: its digest is {actual}, and {digest} in {source}. "
            f"Remove it and download it again (or remove {source}, if you edited it on purpose)"
        )


def _of_download(path: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Returns the digest that a hub's client left for a file ("" if none), and its location."""
    real = pathlib.Path(os.path.realpath(path))
    if real.parent.name == "blobs" and _digest(real.name):
        return real.name, real
    for folder in path.parents:
        metadata = folder / _DOWNLOADS / path.relative_to(folder)
        metadata = metadata.with_name(f"{metadata.name}.metadata")
        if metadata.is_file():
            lines = metadata.read_text(errors="replace").splitlines()
            return _digest(lines[1].strip('" ') if len(lines) > 1 else ""), metadata
    return "", path


def _digest(text: str) -> str:
    """Returns a text if it is a hexadecimal SHA-256 or SHA-1, else ""."""
    return text if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", text) else ""


def _hash(path: epath.Path, *, git: bool) -> str:
    """Returns the SHA-256 of a file, or Git's SHA-1."""
    if git:
        digest = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
