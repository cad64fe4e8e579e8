"""Finds a published model: in the folder or file that a user names, or beneath it."""

import os

from etils import epath

from kvjax.convert.tensors import listed
from kvjax.foundation.errors import UserError, first_line

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_HUB = "models--"  # how the hub's cache names a model's folder: models--owner--name
_OF_MODEL = ("snapshots", "refs", "blobs")  # what such a folder holds
_ABOVE = (".", "hub", "huggingface/hub")  # where that cache is, in it or in a folder above
_BESIDE_OTHERS = (".safetensors", ".json", ".bin", ".pt", ".pth")
# Tokenizers that are not read, by the file that holds them.
_OTHER_TOKENIZERS = {
    "tokenizer.model": "SentencePiece's (or tiktoken's)",
    "spiece.model": "SentencePiece's",
    "sentencepiece.bpe.model": "SentencePiece's",
    "vocab.txt": "WordPiece's",
}


def located(path: epath.Path) -> epath.Path:
    """Returns the folder with the config, or the GGUF file, of the model that a path means.

    A folder of the hub's cache means its snapshot, the cache itself its only model; a folder with
    nothing but one GGUF file means that.

    Raises:
      UserError: several models are there, none, or an adapter.
    """
    if not path.is_dir():
        if path.suffix in _BESIDE_OTHERS:
            raise UserError(f"{path} is one file of a model: give its folder")
        return path
    path = _in_hub(path)
    folder = _snapshot(path) if (path / "snapshots").is_dir() else path
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"{folder} holds an adapter ({_ADAPTER}: LoRA and its kin), which changes another "
            "model and is none: merge the two first (peft's merge_and_unload, then "
            f"save_pretrained). If that is done here, remove {_ADAPTER}"
        )
    files = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    there = [each for each in files if each.suffix == ".gguf"]
    if not there or any(each.suffix == ".safetensors" for each in files):
        return folder
    if len(there) > 1:
        names = listed(each.name for each in there)
        raise UserError(f"{folder} has several GGUF files: give one of them: {names}")
    return there[0]


def name(path: epath.Path) -> str:
    """Returns the name of a model: of its folder or file, in the hub's cache the repository's."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_HUB):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name.removesuffix(".gguf")


def check_tokenizer_file(folder: epath.Path) -> None:
    """Raises a UserError unless a folder has a tokenizer.json, naming what it has instead."""
    if (folder / "tokenizer.json").exists():
        return
    for file, kind in _OTHER_TOKENIZERS.items():
        if (folder / file).exists():
            raise UserError(
                f"{folder} has no tokenizer.json, and its {file} is {kind}, which kvjax does not "
                "read: give a model with a byte-level BPE (as GPT-2, Llama 3, Qwen, SmolLM), its "
                "tokenizer loaded with transformers (AutoTokenizer) and saved with save_pretrained"
            )
    raise UserError(
        f"{folder / 'tokenizer.json'} is missing: load the tokenizer with transformers "
        "(AutoTokenizer) and save it beside the weights with save_pretrained"
    )


def _in_hub(path: epath.Path) -> epath.Path:
    """Returns a model's folder of the hub's cache for a folder in it or above it; else the path."""
    absolute = epath.Path(os.path.abspath(path))
    if absolute.name in _OF_MODEL and absolute.parent.name.startswith(_HUB):
        return absolute.parent
    if (path / _CONFIG).exists():
        return path
    for cache in (path / each for each in _ABOVE):
        there = cache.iterdir() if cache.is_dir() else ()
        models = sorted(each.name for each in there if each.name.startswith(_HUB))
        if len(models) > 1:
            raise UserError(f"{cache} is the hub's cache: give a folder of it: {listed(models)}")
        if models:
            return cache / models[0]
    return path


def _snapshot(folder: epath.Path) -> epath.Path:
    """Returns the snapshot of a hub's cache folder that its branch main names, or its only one."""
    there = sorted(each.name for each in (folder / "snapshots").iterdir() if each.is_dir())
    main = folder / "refs" / "main"
    try:
        commit = main.read_text().strip() if main.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{main} cannot be read ({first_line(error)})") from error
    if commit in there:
        return folder / "snapshots" / commit
    if len(there) != 1:
        raise UserError(
            f"{folder} is a folder of the hub's cache with {len(there)} snapshots, of which "
            f"refs/main names none: {'give one of them: ' if there else 'download the model again'}"
            f"{listed(os.path.join('snapshots', each) for each in there)}"
        )
    return folder / "snapshots" / there[0]
