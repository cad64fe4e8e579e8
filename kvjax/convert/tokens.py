"""Which tokens open and end a text, as a published model's own files say it.

`origin.TokenFiles` hold it: the texts of tokens as in tokenizer_config.json, ids as in
generation_config.json, which may name several that end a text.
"""

from collections.abc import Mapping

from etils import epath

from kvjax.convert.tensors import json_object
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.workdir import origin
from kvjax.workdir.origin import GENERATION_CONFIG
from kvjax.workdir.origin import TOKENIZER_CONFIG
from kvjax.workdir.origin import TokenFiles

KINDS = ("bos", "eos", "pad", "unk")
_GGUF = dict(bos=("bos",), eos=("eos", "eot", "eom"), pad=("padding",), unk=("unknown",))


def of_folder(folder: epath.Path, config: Mapping) -> dict[str, dict]:
    """What the files of a published folder say; without generation_config.json its config does."""
    files = {}
    if (folder / TOKENIZER_CONFIG).exists():
        about = json_object(folder / TOKENIZER_CONFIG)
        keys = [f"{kind}_token" for kind in KINDS]
        files[TOKENIZER_CONFIG] = {key: _text(about[key]) for key in keys if key in about}
    if (folder / GENERATION_CONFIG).exists():
        files[GENERATION_CONFIG] = json_object(folder / GENERATION_CONFIG)
    elif found := _ids(config):
        files[GENERATION_CONFIG] = found
    return files


def of_gguf(metadata: Mapping) -> dict[str, dict]:
    """What a GGUF file says."""
    tokens = dict(enumerate(metadata.get("tokenizer.ggml.tokens") or []))
    texts, ids = {}, {}
    for kind, names in _GGUF.items():
        said = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        there = [i for i in dict.fromkeys(said) if i in tokens]
        if there:
            texts[f"{kind}_token"] = tokens[there[0]]
            ids[f"{kind}_token_id"] = there if len(there) > 1 else there[0]
    ids.pop("unk_token_id", None)  # which no generation_config.json has
    return {TOKENIZER_CONFIG: texts, GENERATION_CONFIG: ids} if texts else {}


def texts(files: TokenFiles, tokenizer_json: str, vocab_size: int) -> dict[str, str | None]:
    """By kind, the tokens that files name; those of which they say nothing are not there."""
    backend = tokenizer_lib.parse(tokenizer_json)
    said, found = files.get(TOKENIZER_CONFIG, {}), {}
    for kind in KINDS:
        ids = origin.token_ids(files, kind, vocab_size)
        if f"{kind}_token" in said:
            found[kind] = _text(said[f"{kind}_token"])
        elif ids:
            found[kind] = backend.id_to_token(ids[0])
    return found


def _ids(config: Mapping) -> dict:
    """The keys of a generation_config.json that a config.json has, of tokens that there are."""
    rows = config.get("vocab_size")
    rows = rows if type(rows) is int else 0
    keys = {kind: f"{kind}_token_id" for kind in ("bos", "eos", "pad")}
    ids = {kind: origin.token_ids({GENERATION_CONFIG: config}, kind, rows) for kind in keys}
    return {key: config[key] for kind, key in keys.items() if ids[kind]}


def _text(value) -> str | None:
    """A token of tokenizer_config.json: its text, or an object with that."""
    value = value.get("content") if isinstance(value, dict) else value
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        return None  # halves of a character are in no vocabulary
    return value
