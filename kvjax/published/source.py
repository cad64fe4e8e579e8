"""Locates a published model in or below the folder or file that a user names."""

import os

from etils import epath

from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.text import listed

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_HUB = "models--"  # prefix of a model's folder in the hub's cache: models--owner--name
_HUB_CONTENTS = ("snapshots", "refs", "blobs")  # folders in a model's folder
_CACHES = (".", "hub", "huggingface/hub")  # where the hub's cache may lie below a folder
_FOLDER_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")


def model_path(path: epath.Path) -> epath.Path:
    """Returns the folder with config.json, or the GGUF file, of the model at a path.

    The path may also be a model's folder in the hub's cache, the cache itself if it has one model,
    or a folder whose only model is one GGUF file.

    Raises:
      UserError: there are several models, none, or an adapter.
    """
    if not path.is_dir():
        if path.suffix in _FOLDER_FILES:
            raise UserError(f"{path} is one file of a model: give its folder")
        return path
    path = _in_hub(path)
    folder = _snapshot(path) if (path / "snapshots").is_dir() else path
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"{folder} holds an adapter ({_ADAPTER}, such as LoRA), not a model: merge it into its "
            "model first (peft's merge_and_unload, then save_pretrained). If that is done, remove "
            f"{_ADAPTER}"
        )
    files = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    gguf = [each for each in files if each.suffix == ".gguf"]
    if not gguf or any(each.suffix == ".safetensors" for each in files):
        return folder
    if len(gguf) > 1:
        names = listed(each.name for each in gguf)
        raise UserError(f"{folder} has several GGUF files: give one of them: {names}")
    return gguf[0]


def name(path: epath.Path) -> str:
    """Returns the name of a model's folder or file, or of its repository in the hub's cache."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_HUB):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name.removesuffix(".gguf")


def check_tokenizer_file(folder: epath.Path) -> None:
    """Raises a UserError unless a folder has a tokenizer.json or a tokenizer.model."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError(
            f"{folder / 'tokenizer.json'} is missing: give a model with this file, or load its "
            "tokenizer with transformers (AutoTokenizer) and save it with save_pretrained"
        )


def _in_hub(path: epath.Path) -> epath.Path:
    """Returns the model's folder in the hub's cache if a path is in or above it; else the path."""
    absolute = epath.Path(os.path.abspath(path))
    if absolute.name in _HUB_CONTENTS and absolute.parent.name.startswith(_HUB):
        return absolute.parent
    if (path / _CONFIG).exists():
        return path
    for cache in (path / each for each in _CACHES):
        entries = cache.iterdir() if cache.is_dir() else ()
        models = sorted(each.name for each in entries if each.name.startswith(_HUB))
        if len(models) > 1:
            raise UserError(f"{cache} is the hub's cache: give a folder of it: {listed(models)}")
        if models:
            return cache / models[0]
    return path


def _snapshot(folder: epath.Path) -> epath.Path:
    """Returns the snapshot that a cached model's branch main names, or its only one."""
    names = sorted(each.name for each in (folder / "snapshots").iterdir() if each.is_dir())
    main = folder / "refs" / "main"
    try:
        commit = main.read_text().strip() if main.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{main} cannot be read ({first_line(error)})") from error
    if commit in names:
        return folder / "snapshots" / commit
    if len(names) != 1:
        advice = "give one of them: " if names else "download the model again"
        raise UserError(
            f"{folder} is a folder of the hub's cache with {len(names)} snapshots, and refs/main "
            f"names none of them: {advice}"
            f"{listed(os.path.join('snapshots', each) for each in names)}"
        )
    return folder / "snapshots" / names[0]
