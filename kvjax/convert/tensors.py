"""Tensors of a safetensors folder: names, shapes and dtypes at once, data one tensor at a time."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import os
import re

from etils import epath
import ml_dtypes
import numpy as np

from kvjax.convert import digests
from kvjax.foundation import extras, json_text
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import is_special, matching_entries
from kvjax.foundation.text import listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Dtypes that weights may have, by safetensors' names.
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PLAIN_NAME = re.compile(r"[^/.][^/]*$")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    path: epath.Path  # the file
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    load: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        """Returns the tensor's data; raises a UserError if it is not finite."""
        return self.checked(self.load())

    def checked(self, array: np.ndarray) -> np.ndarray:
        """Returns an array derived from this tensor; raises a UserError if it is not finite."""
        advice = "download the file again, or take an earlier checkpoint"
        return check_finite(array, f"{self.path}: {self.name}", advice)


def check_finite(array: np.ndarray, name: str, advice: str) -> np.ndarray:
    """Returns the array; raises a UserError if a value is not finite.

    Args:
      name: file and weight, for the start of the message.
      advice: end of the message.
    """
    non_finite = array.size - np.count_nonzero(np.isfinite(array))
    if non_finite:
        raise UserError(
            f"{name} has {non_finite:,} of {array.size:,} values that are not finite: {advice}"
        )
    return array


def open_folder(folder: epath.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name; reads only the files' headers.

    Raises:
      UserError: the folder has no safetensors, its index is broken, files are missing or truncated
        (the message names all of them), or files hold other tensors than the index lists.
    """
    if (folder / SINGLE).exists():
        return _open_files(folder, [SINGLE])
    if not (folder / INDEX).exists():
        files = [path.name for path in matching_entries(folder, "*.safetensors")]
        if len(files) == 1 and not _is_one_of_several(files[0]):
            return _open_files(folder, files)
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX} (other weights: "
            f"{listed(others) or 'none'}): download these, or load the model with transformers and "
            "save it with save_pretrained"
        )
    file_of = _index(folder / INDEX)
    tensors = _open_files(folder, sorted(set(file_of.values())))
    misplaced = [n for n, f in file_of.items() if n not in tensors or tensors[n].path.name != f]
    unlisted = [n for n in tensors if n not in file_of]
    for names, problem in ((misplaced, "lists tensors in the wrong files"), (unlisted, "lacks")):
        if names:
            shown = listed(f"{n} ({file_of.get(n) or tensors[n].path.name})" for n in names)
            raise UserError(
                f"{folder / INDEX} {problem}: {shown}. Download index and files again, of one model"
            )
    return tensors


def _is_one_of_several(name: str) -> bool:
    """Returns True for names such as model-00001-of-00003.safetensors."""
    match = re.search(r"-(\d+)-of-(\d+)\.safetensors$", name)
    return match is not None and int(match[2]) > 1


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


def _index(path: epath.Path) -> Mapping[str, str]:
    """Returns the file of each tensor according to an index."""
    index = json_object(path)
    files = index.get("weight_map")
    valid = isinstance(files, dict) and files
    if not valid or not all(isinstance(f, str) and _PLAIN_NAME.match(f) for f in files.values()):
        raise UserError(
            f"{path}: weight_map must give a file beside it for every tensor: download it again"
        )
    return files


def _open_files(folder: epath.Path, names: list[str]) -> dict[str, StoredTensor]:
    extras.require(os.fspath(folder), "safetensors")
    import safetensors

    # Opening a pipe would block.
    missing = [n for n in names if is_special(folder / n) or not (folder / n).exists()]
    files, broken = {}, []
    for name in names:
        try:
            if name not in missing:
                digests.check_download(folder / name)
                files[name] = safetensors.safe_open(folder / name, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            broken.append(f"{name} ({first_line(error)})")
    problems = [f"lacks {listed(missing)}"] if missing else []
    problems += [f"has damaged files: {listed(broken)}"] if broken else []
    if problems:
        raise UserError(f"{folder} {' and '.join(problems)}: download these files again")
    return {
        key: _stored(files[name], folder / name, key)
        for name in names
        for key in files[name].keys()
    }


def _stored(file, path: epath.Path, key: str) -> StoredTensor:
    unread = file.get_slice(key)
    digest = (file.metadata() or {}).get(digests.key_of(key))

    def load() -> np.ndarray:
        array = file.get_tensor(key)
        if digest is not None and digests.of_array(array) != digest:
            raise UserError(f"{path}: {key} differs from its digest: copy the file again")
        return array

    return StoredTensor(path, key, tuple(unread.get_shape()), unread.get_dtype(), load)


def dtype_of(stored: Iterable[StoredTensor]) -> np.dtype:
    """Returns the tensors' common dtype, else float32, which holds any."""
    kinds = {tensor.dtype for tensor in stored}
    return np.dtype(DTYPES[kinds.pop()] if len(kinds) == 1 else np.float32)


def check(
    source: epath.Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a UserError unless a source has exactly the tensors of `shapes`, in `DTYPES`."""
    for name in shapes:
        if name in tensors and tensors[name].dtype not in DTYPES:
            raise UserError(
                f"{source}: {name} is stored as {tensors[name].dtype}; weights must be "
                f"{', '.join(DTYPES)}: dequantise the model with the program that wrote it, and "
                "save it in bfloat16"
            )
    for names, problem in (
        (shapes.keys() - tensors.keys(), "lacks tensors that its config describes"),
        (tensors.keys() - shapes.keys(), "has tensors that its config does not describe"),
    ):
        if names:
            raise UserError(
                f"{source} {problem}: {listed(sorted(names))}. Give the files of one model"
            )
    for name, shape in shapes.items():
        stored = tensors[name].shape
        if stored != shape:
            raise UserError(
                f"{source}: {name} has shape {stored}, but its config gives {shape}: give the "
                "config that belongs to the weights"
            )


def json_object(path: epath.Path) -> dict:
    """Returns the object in a downloaded JSON file; raises a UserError if it has none."""
    return json_text.read_object(path, "download it again")
