"""The tensors of a folder of safetensors: names, shapes and dtypes at once, data one at a time."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import os
import re

from etils import epath
import ml_dtypes
import numpy as np

from kvjax.convert import digests, finite
from kvjax.foundation import extras, json_text
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import named, special
from kvjax.layers.weight import Axes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}  # that weights may have
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    path: epath.Path  # of the file
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name of it; weights must have one of `DTYPES`
    load: Callable[[], np.ndarray]

    def read(self, axes: Axes | None = None) -> np.ndarray:
        """Its data, of one of `DTYPES`; see `checked`."""
        return self.checked(self.load(), axes)

    def checked(self, array: np.ndarray, axes: Axes | None = None) -> np.ndarray:
        """Its data or what was made of them; a UserError if some are NaN or infinite."""
        advice = "download the file again, or take a checkpoint from before they were"
        return finite.check_finite(array, f"{self.path}: {self.name}", advice, axes)


def open_folder(folder: epath.Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name; of their files only the headers are read.

    Raises:
      UserError: no safetensors, a broken index, files that are missing or cut off (all of them are
        named), or that hold other tensors than the index says.
    """
    if (folder / SINGLE).exists():
        return _open_files(folder, [SINGLE])
    if not (folder / INDEX).exists():
        only = [path.name for path in named(folder, "*.safetensors")]
        if len(only) == 1 and not _is_part(only[0]) and not os.path.islink(folder / SINGLE):
            return _open_files(folder, only)
        for name in (SINGLE, INDEX):
            if os.path.islink(folder / name):
                raise UserError(
                    f"{folder / name} is a link to {os.readlink(folder / name)}, which is not "
                    "there: download it again"
                )
        there = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX} (weights there: {listed(there) or 'none'}):"
            " download these, or load the model with transformers and save it with save_pretrained"
        )
    file_of = _index(folder / INDEX)
    tensors = _open_files(folder, sorted(set(file_of.values())))
    elsewhere = [n for n, f in file_of.items() if n not in tensors or tensors[n].path.name != f]
    unlisted = [n for n in tensors if n not in file_of]
    for wrong, what in ((elsewhere, "says where these are, and they are not"), (unlisted, "lacks")):
        if wrong:
            shown = listed(f"{n} ({file_of.get(n) or tensors[n].path.name})" for n in wrong)
            raise UserError(
                f"{folder / INDEX} {what}: {shown}. It belongs to other files: download both again"
            )
    return tensors


def _is_part(name: str) -> bool:
    """True if a file is named as one of several, as model-00001-of-00003.safetensors is."""
    found = re.search(r"-(\d+)-of-(\d+)\.safetensors$", name)
    return found is not None and int(found[2]) > 1


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


def _index(path: epath.Path) -> Mapping[str, str]:
    """By tensor, the file that an index says it is in."""
    index = json_object(path)
    files = index.get("weight_map")
    if not (isinstance(files, dict) and files and all(isinstance(f, str) for f in files.values())):
        raise UserError(
            f"{path}: weight_map must give a file for every tensor: download the index again"
        )
    for file in files.values():
        if "/" in file or file in ("", ".", ".."):
            raise UserError(f"{path}: weight_map names {file!r}: must be a file beside the index")
    return files


def _open_files(folder: epath.Path, names: list[str]) -> dict[str, StoredTensor]:
    extras.require(os.fspath(folder), "safetensors")
    import safetensors

    # who opens a pipe waits
    missing = [n for n in names if special(folder / n) or not (folder / n).exists()]
    files, broken = {}, []
    for name in names:
        try:
            if name not in missing:
                digests.check_download(folder / name)
                files[name] = safetensors.safe_open(folder / name, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            broken.append(f"{name} ({first_line(error)})")
    problems = [f"lacks {listed(missing)}"] if missing else []
    problems += [f"has files that are cut off or damaged: {listed(broken)}"] if broken else []
    if problems:
        raise UserError(f"{folder} {' and '.join(problems)}: download these files again")
    return {
        key: _stored(files[name], folder / name, key)
        for name in names
        for key in files[name].keys()
    }


def _stored(file, path: epath.Path, key: str) -> StoredTensor:
    part = file.get_slice(key)
    digest = (file.metadata() or {}).get(digests.key_of(key))

    def load() -> np.ndarray:
        array = file.get_tensor(key)
        if digest is not None and digests.of_array(array) != digest:
            raise UserError(f"{path}: {key} has other bytes than were written: copy the file again")
        return array

    return StoredTensor(path, key, tuple(part.get_shape()), part.get_dtype(), load)


def dtype_of(stored: Iterable[StoredTensor]) -> np.dtype:
    """The dtype that all tensors have, or float32, which holds any."""
    kinds = {tensor.dtype for tensor in stored}
    return np.dtype(DTYPES[kinds.pop()] if len(kinds) == 1 else np.float32)


def check(
    source: epath.Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a UserError unless a source has these tensors and no others, in dtypes of weights."""
    for name in shapes:
        if name in tensors and tensors[name].dtype not in DTYPES:
            raise UserError(
                f"{source}: {name} is stored as {tensors[name].dtype}; weights must be "
                f"{', '.join(DTYPES)}: load the model with what wrote it, dequantise it and save it"
                " in bfloat16 first"
            )
    for names, what in (
        (shapes.keys() - tensors.keys(), "lacks tensors that its config describes"),
        (tensors.keys() - shapes.keys(), "has tensors that its config does not describe"),
    ):
        if names:
            raise UserError(
                f"{source} {what}: {listed(sorted(names))}. Give the files of one model"
            )
    for name, shape in shapes.items():
        there = tensors[name].shape
        if there != shape:
            raise UserError(
                f"{source}: {name} has shape {there}, and by its config {shape}: give the config "
                "that belongs to the weights"
            )


def json_object(path: epath.Path) -> dict:
    """The object of a JSON file; a UserError where there is none."""
    return json_text.read_object(path, "download it again")


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
