"""Files are checked against the digests of a model hub's client before they are read."""

import hashlib
import json
import shutil

from etils import epath
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.convert import digests, gguf_file, tensors
from kvjax.foundation.errors import UserError
from tests import damage


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_git(content: bytes) -> str:
    """Returns Git's object name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def in_cache(folder, name, content, digest):
    """Writes a file as `snapshot_download` does: a link to a blob that is named by its digest."""
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / digest).write_bytes(content)
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc" / name).symlink_to(f"../../blobs/{digest}")
    return folder / "snapshots/abc" / name


def in_folder(folder, name, content, digest):
    """Writes a file as `snapshot_download(local_dir=...)` does in a folder of the repository."""
    told = folder / ".cache/huggingface/download/part" / f"{name}.metadata"
    told.parent.mkdir(parents=True)
    told.write_text(f"{'0' * 40}\n{digest}\n1700000000.5\n")
    (folder / "part").mkdir()
    (folder / "part" / name).write_bytes(content)
    return folder / "part" / name


@pytest.mark.parametrize("place", [in_cache, in_folder])
def test_flipped_bits_of_downloads_are_refused(tmp_path, place):
    for digest in (sha256, of_git):
        (tmp_path / digest.__name__).mkdir()
        _check(tmp_path / digest.__name__, place, digest)


def _check(tmp_path, place, digest):
    assert of_git(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    save_file({"a": np.arange(3.0)}, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    file = place(tmp_path / "hub", "model.safetensors", content, digest(content))
    folder = epath.Path(file.parent)
    assert tensors.open_folder(folder)["a"].load().tolist() == [0.0, 1.0, 2.0]
    for _ in damage.flips([file.resolve()], 20):
        with pytest.raises(UserError, match=r"model\.safetensors differs from the download"):
            tensors.open_folder(folder)
    name = "model.gguf"
    gguf = place(tmp_path / "gguf", name, b"GGUF", digest(b"other"))
    with pytest.raises(UserError, match=r"model\.gguf differs from the download.* download it"):
        gguf_file.File(epath.Path(gguf))


def test_files_without_a_digest(tmp_path):
    file = in_folder(tmp_path, "model.gguf", b"GGUF", "")
    told = tmp_path / ".cache/huggingface/download/part/model.gguf.metadata"
    for text in ("", "commit", *(f"commit\n{etag}\n1" for etag in ("W/abc", "0" * 63, "g" * 64))):
        told.write_text(text)
        digests.check_download(epath.Path(file))
    shutil.rmtree(tmp_path / ".cache")
    digests.check_download(epath.Path(file))


def blake2b(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def test_files_of_an_export(tmp_path):
    """Compares with BLAKE2b of 16 bytes, over UTF-8 text."""
    folder, texts = epath.Path(tmp_path), {"a.json": "\u00e9\n", "b": ""}
    digests.check_files(folder)  # a folder without digests, as from older versions
    text = digests.of_files(texts)
    expected = {"a.json": blake2b(b"\xc3\xa9\n"), "b": blake2b(b"")}
    assert text == json.dumps({"blake2b": expected}, indent=1) + "\n"
    for name, content in (texts | {"digests.json": text, "other": "?"}).items():
        (tmp_path / name).write_text(content, "utf-8")
    digests.check_files(folder)
    advice = "copy the folder again, or remove this file if you edited the folder on purpose"
    (tmp_path / "a.json").write_text("e\n")
    with pytest.raises(UserError) as error:
        digests.check_files(folder)
    a_json = tmp_path / "a.json"
    assert str(error.value) == f"{a_json} differs from its digest in digests.json: {advice}"
    a_json.unlink()
    with pytest.raises(UserError) as error:
        digests.check_files(folder)
    assert str(error.value) == f"{a_json} is missing, but listed in digests.json: {advice}"
    for said in ("{}", '{"blake2b": []}'):
        (tmp_path / "digests.json").write_text(said)
        with pytest.raises(UserError, match=rf"digests\.json has no blake2b: {advice}"):
            digests.check_files(folder)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert digests.of_array(array.T) == blake2b(array.T.tobytes())
    assert digests.key_of("layers.0.up") == "blake2b:layers.0.up"
