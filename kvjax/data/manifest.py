"""Writes and checks `dataset.json`, the manifest of a folder of prepared data.

Whenever the folder is opened, its JSON files are compared with digests in the manifest. Files of
rows have checksums of their own (ArrayRecord), so only their sizes are compared.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from etils import epath

from kvjax.data import config as config_lib
from kvjax.foundation import files as files_lib, json_text
from kvjax.foundation.errors import DataError, MissingDataError
from kvjax.foundation.files import in_bucket

# Part of the hash in folders' names. Increase it if a change of code packs a text into other rows.
FORMAT_VERSION = 1
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
DIGESTS = "digests.json"  # in a tokenizer's folder, which has no manifest
ROWS = "packed_rows"
ROWS_VERSION = "1.0.0"
SPLITS = ("train", "validation")
INTEGRITY_KEYS = ("files", "blake2b")  # keys of the manifest that serve only to detect damage


class DamagedDataError(DataError):
    """Prepared data whose files differ from those that were written."""

    def __init__(self, folder: epath.PathLike, damage: str, config: dict | None = None):
        command = f": `{config_lib.command(config)}`" if config else ""
        super().__init__(
            f"{os.fspath(folder)} is damaged: {damage}. Move that folder away and prepare it "
            f"again{command}"
        )
        self.damage = damage


def write(folder: pathlib.Path, info: dict[str, Any], files: dict[str, dict]) -> None:
    """Writes the manifest of a local folder.

    Args:
      info: content of the manifest, without INTEGRITY_KEYS.
      files: sizes and digests of the data set's files, as `digests` returns them.
    """
    info = info | {"files": files}
    info["blake2b"] = _manifest_digest(info)
    (folder / MANIFEST).write_text(json.dumps(info, indent=2) + "\n")


def read(folder: epath.Path) -> dict[str, Any]:
    """Returns a folder's manifest, after checking its files.

    Raises:
      MissingDataError: the folder has no manifest.
      DamagedDataError: the manifest or a file does not match its size or digest.
      DataError: the folder has another format version.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise MissingDataError(
            f"{os.fspath(folder)} holds no prepared data (no {MANIFEST}): `python -m"
            " kvjax.data.prepare --source=...` prints the folder it prepares"
        )
    try:
        info = json_text.parse(path.read_bytes())
        version = info["format_version"]
        _check_keys(info, version)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        damage = f"{MANIFEST} is not as it was written ({type(error).__name__}: {error})"
        raise DamagedDataError(folder, damage) from error
    if version != FORMAT_VERSION:
        raise DataError(
            f"{os.fspath(folder)} has format {version}, this code reads {FORMAT_VERSION}: prepare "
            f"it again with `{config_lib.command(info['config'])}`"
        )
    check_digests(folder, info.get("files", {}), info["config"])
    return info


def digests(folder: pathlib.Path) -> dict[str, dict]:
    """Returns {path: {"bytes": size}} of a local folder's files; JSON files also have "blake2b"."""
    entries = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        entries[name] = {"bytes": file.stat().st_size}
        if name.endswith(".json"):
            entries[name]["blake2b"] = _hash(file.read_bytes())
    return entries


def check_digests(folder: epath.Path, files: dict[str, dict], config: dict | None = None) -> None:
    """Raises a DamagedDataError unless a folder's files match their sizes and digests.

    In a bucket, files without a digest are not checked, since thousands of shards would need
    thousands of requests.

    Args:
      files: sizes and digests, as `digests` returns them.
      config: config of the folder's preparation, for the message.
    """
    root = os.fspath(folder)
    for name, expected in files.items():
        if "blake2b" not in expected and in_bucket(root):
            continue
        size = files_lib.size(os.path.join(root, name))
        if size is None:
            raise DamagedDataError(folder, f"{name} is missing", config)
        if size != expected["bytes"]:
            damage = f"{name} has {size:,} bytes, but {expected['bytes']:,} were written"
            raise DamagedDataError(folder, damage, config)
        if "blake2b" not in expected:
            continue
        if _hash((folder / name).read_bytes()) != expected["blake2b"]:
            raise DamagedDataError(folder, f"{name} has other bytes than were written", config)


def digest_of(*values: Any) -> str:
    """Returns a hash of values for folders' names, 20 hexadecimal digits."""
    return hashlib.blake2b(repr(values).encode(), digest_size=10).hexdigest()


def _check_keys(info: dict[str, Any], version: int) -> None:
    """Raises a ValueError, TypeError or KeyError unless all keys that the code uses are valid."""
    if "blake2b" in info and _manifest_digest(info) != info["blake2b"]:
        raise ValueError("its digest does not match")
    length = dict(info["config"])["sequence_length"]
    if version == FORMAT_VERSION:
        rows = [info["splits"][split]["rows"] for split in SPLITS]
        if not min(length, *rows) >= 0:
            raise ValueError("a length or count is negative")
        float(info["xz_bits_per_byte"])


def _manifest_digest(info: dict[str, Any]) -> str:
    content = {key: value for key, value in info.items() if key != "blake2b"}
    return _hash(json.dumps(content, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
