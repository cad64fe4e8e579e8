"""Digests that reveal damage in files of weights: those of kvjax's exports, and a model hub's.

An export has the BLAKE2b of every tensor in its file's metadata, and of its other files in
digests.json. Of a published file, the hub's client leaves SHA-256 (or Git's SHA-1 of a small one):
as the name that a link in its cache leads to, or as the etag of a download into a folder. Each
reveals any change at all, but for collisions of which none is known by chance.
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
_BLOCK = 1 << 24  # bytes that are read at a time


# -- kvjax's own -----------------------------------------------------------------------------------


def key_of(tensor: str) -> str:
    """Returns the key of a tensor's digest in the metadata of a safetensors file."""
    return f"{_KEY}:{tensor}"


def of_array(array: np.ndarray) -> str:
    """Returns the digest of an array's bytes."""
    return _of_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def of_files(texts: Mapping[str, str]) -> str:
    """Returns the text of digests.json for the texts of files by name."""
    found = {name: _of_bytes(text.encode()) for name, text in texts.items()}
    return json.dumps({_KEY: found}, indent=1) + "\n"


def check_files(folder: epath.Path) -> None:
    """Raises a UserError unless a folder's files are those in its digests.json, if it has one."""
    path = folder / FILE
    if not path.exists():
        return
    advice = "copy the folder again, or remove this file if what it tells of was changed on purpose"
    digests = json_text.read_object(path, advice).get(_KEY)
    if not isinstance(digests, dict):
        raise UserError(f"{path} has no {_KEY}: {advice}")
    for name, digest in digests.items():
        file = folder / name
        if not file.exists() or _of_bytes(file.read_bytes()) != digest:
            what = "has other bytes than" if file.exists() else "is missing, and"
            raise UserError(f"{file} {what} {path.name} tells of: {advice}")


def _of_bytes(content: bytes | np.ndarray) -> str:
    return hashlib.blake2b(content, digest_size=_BYTES).hexdigest()


# -- a hub's ---------------------------------------------------------------------------------------


def check_download(path: epath.Path) -> None:
    """Raises a UserError if a hub's digest of a file is at hand, and is another."""
    digest, source = _of_download(pathlib.Path(path))
    if not digest:
        return
    with progress.waiting(f"checking the digest of {path.name}"):
        found = _hash(path, git=len(digest) == 40)
    if found != digest:
        raise UserError(
            f"{path} is not what was downloaded: its digest is {found}, and by {source} "
            f"{digest}. Remove it and download it again (or remove {source}, if it was changed on "
            "purpose)"
        )


def _of_download(path: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Returns the digest that a hub's client left of a file, or "", and the file that has it."""
    real = pathlib.Path(os.path.realpath(path))
    if real.parent.name == "blobs" and _digest(real.name):
        return real.name, real
    for folder in path.parents:
        told = folder / _DOWNLOADS / path.relative_to(folder)
        told = told.with_name(f"{told.name}.metadata")
        if told.is_file():
            lines = told.read_text(errors="replace").splitlines()
            return _digest(lines[1].strip('" ') if len(lines) > 1 else ""), told
    return "", path


def _digest(text: str) -> str:
    """Returns a text if it is the hexadecimal of SHA-256 or SHA-1, else ""."""
    return text if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", text) else ""


def _hash(path: epath.Path, *, git: bool) -> str:
    """SHA-256 of a file's bytes, or the SHA-1 that Git names a file by."""
    if git:
        found = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    else:
        found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
