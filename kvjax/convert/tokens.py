"""Added and special tokens of a published model.

Added tokens are in tokenizer.json, but in older and edited folders some are only in other files
(`added`). Special tokens are kept as `origin.TokenFiles`: texts as in tokenizer_config.json, ids as
in generation_config.json, which may list several ids for the end of a text.
"""

from collections.abc import Iterable, Iterator, Mapping
import json

from etils import epath

from kvjax.convert.tensors import json_object
from kvjax.data import sentence_pieces, tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.workdir import origin
from kvjax.workdir.origin import GENERATION_CONFIG, TOKENIZER_CONFIG, TokenFiles

ADDED_TOKENS = "added_tokens.json"
KINDS = ("bos", "eos", "pad", "unk")
SPECIAL_TOKENS = "special_tokens_map.json"
_DECODER = "added_tokens_decoder"  # in TOKENIZER_CONFIG: flags of added tokens, by their ids
_MORE = (
    "sep_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",  # name of additional_special_tokens in transformers 5
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_GGUF = dict(bos=("bos",), eos=("eos", "eot", "eom"), pad=("padding",), unk=("unknown",))


def of_folder(folder: epath.Path, config: Mapping) -> dict[str, dict]:
    """Returns the special tokens of a published folder, as `origin.TokenFiles`.

    Without generation_config.json, the ids come from config.json.
    """
    files = {}
    about = _about(folder)
    if about or (folder / TOKENIZER_CONFIG).exists():
        keys = [f"{kind}_token" for kind in KINDS]
        files[TOKENIZER_CONFIG] = {key: _text(about[key]) for key in keys if key in about}
    if (folder / GENERATION_CONFIG).exists():
        files[GENERATION_CONFIG] = json_object(folder / GENERATION_CONFIG)
    elif ids := _ids(config):
        files[GENERATION_CONFIG] = ids
    return files


def named_in_folder(folder: epath.Path) -> set[str]:
    """Returns the texts of the special tokens that a folder's files name."""
    about, texts = _about(folder), set()
    for key in (*(f"{kind}_token" for kind in KINDS), *_MORE):
        value = about.get(key)
        if isinstance(value, Mapping) and "content" not in value:  # {name: token}
            value = list(value.values())
        texts |= {_text(each) for each in (value if isinstance(value, list) else [value])}
    return texts - {None}


def named_in_gguf(metadata: Mapping) -> set[str]:
    """Returns the texts of the special tokens that a GGUF file names."""
    tokens = dict(enumerate(metadata.get("tokenizer.ggml.tokens") or []))
    keys = [f"tokenizer.ggml.{name}_token_id" for names in _GGUF.values() for name in names]
    ids = [metadata.get(key) for key in keys]
    return {tokens[i] for i in ids if type(i) is int and i in tokens}


def added(folder: epath.Path) -> list[dict]:
    """Returns the added tokens of a folder's files other than tokenizer.json.

    Only tokens from tokenizer_config.json have flags.

    Raises:
      UserError: a token has no text or no valid id.
    """
    path, decoder = folder / ADDED_TOKENS, _about(folder).get(_DECODER)
    listed = json_object(path) if path.exists() else {}
    tokens = [_token(path, text, i) for text, i in listed.items()]
    if isinstance(decoder, Mapping):
        tokens += _in_decoder(folder / TOKENIZER_CONFIG, decoder)
    return tokens


def completed(
    tokenizer_json: str,
    named: Iterable[str],
    source: epath.Path,
    other_tokens: Iterable[Mapping] = (),
) -> str:
    """Returns a tokenizer.json with all of its model's added tokens; named ones become special.

    Args:
      named: texts of special tokens; tokens that ordinary text encodes to, such as "!", stay
        ordinary.
      source: for messages.
      other_tokens: added tokens of other files; their flags take precedence.

    Raises:
      UserError: `other_tokens` contradict the ids of tokenizer.json.
    """
    try:
        definition = json.loads(tokenizer_json)
        vocab = definition["model"]["vocab"]
        if isinstance(vocab, list):  # a Unigram's: (token, score) in the order of ids
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        ids = dict(vocab)
        listed = {token["content"]: token for token in definition.get("added_tokens") or []}
        ids |= {text: int(token["id"]) for text, token in listed.items()}
    except (ValueError, TypeError, KeyError):  # not a BPE: refused by `check_tokenizer`
        return tokenizer_json
    texts = {i: text for text, i in ids.items()}
    tokens = {}
    for token in other_tokens:
        text, i = token["content"], token["id"]
        if ids.get(text, i) != i or texts.get(i, text) != text:
            conflict = f"{text!r} is {ids[text]}" if text in ids else f"{i} is {texts[i]!r}"
            raise UserError(
                f"{source}: {conflict}, but {text!r} is {i} in {ADDED_TOKENS} or "
                f"{TOKENIZER_CONFIG}: download the tokenizer's files again, all of the same model"
            )
        ids[text], texts[i] = i, text
        tokens[text] = dict(special=False) | listed.get(text, {}) | token
    for text in named:
        token = tokens.get(text, listed.get(text))
        if token is None and text in ids and not _is_text(tokenizer_json, text, ids[text]):
            token = dict(content=text, id=ids[text])
        if token is not None:
            tokens[text] = dict(token, special=True)
    if all(listed.get(text) == token for text, token in tokens.items()):
        return tokenizer_json
    return json.dumps(tokenizer_lib.with_added(definition, tokens.values()), ensure_ascii=False)


def of_gguf(metadata: Mapping) -> dict[str, dict]:
    """Returns the special tokens of a GGUF file, as `origin.TokenFiles`."""
    tokens = dict(enumerate(metadata.get("tokenizer.ggml.tokens") or []))
    texts, ids = {}, {}
    for kind, names in _GGUF.items():
        listed = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        known = [i for i in dict.fromkeys(listed) if i in tokens]
        if known:
            texts[f"{kind}_token"] = tokens[known[0]]
            ids[f"{kind}_token_id"] = known if len(known) > 1 else known[0]
    ids.pop("unk_token_id", None)  # not a key of generation_config.json
    return {TOKENIZER_CONFIG: texts, GENERATION_CONFIG: ids} if texts else {}


def texts(files: TokenFiles, tokenizer_json: str, vocab_size: int) -> dict[str, str | None]:
    """Returns the token text by kind, for the kinds that the files mention."""
    backend = tokenizer_lib.parse(tokenizer_json)
    config, by_kind = files.get(TOKENIZER_CONFIG, {}), {}
    for kind in KINDS:
        ids = origin.token_ids(files, kind, vocab_size)
        if f"{kind}_token" in config:
            by_kind[kind] = _text(config[f"{kind}_token"])
        elif ids:
            by_kind[kind] = backend.id_to_token(ids[0])
    return by_kind


def _ids(config: Mapping) -> dict:
    """Returns the token ids of config.json that lie in the vocabulary, by their keys."""
    rows = config.get("vocab_size")
    rows = rows if type(rows) is int else 0
    keys = {kind: f"{kind}_token_id" for kind in ("bos", "eos", "pad")}
    ids = {kind: origin.token_ids({GENERATION_CONFIG: config}, kind, rows) for kind in keys}
    return {key: config[key] for kind, key in keys.items() if ids[kind]}


def _text(value) -> str | None:
    """Returns a token's text from tokenizer_config.json, where it is a string or an object."""
    value = value.get("content") if isinstance(value, dict) else value
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        return None  # lone surrogates are in no vocabulary
    return value


def _about(folder: epath.Path) -> dict:
    """Returns tokenizer_config.json, with special_tokens_map.json if it has no added tokens."""
    paths = (folder / TOKENIZER_CONFIG, folder / SPECIAL_TOKENS)
    about, special = (json_object(path) if path.exists() else {} for path in paths)
    return about if about.get(_DECODER) else about | special


def _in_decoder(path: epath.Path, decoder: Mapping) -> Iterator[dict]:
    for key, token in decoder.items():
        i = int(key) if key.isdecimal() and len(key) < 10 else None
        flags = token if isinstance(token, Mapping) else {}
        known_flags = {flag: flags[flag] for flag in _FLAGS if type(flags.get(flag)) is bool}
        yield _token(path, token, i) | known_flags


def _token(path: epath.Path, text, i) -> dict:
    content = _text(text)
    if not content or type(i) is not int or i < 0:
        raise UserError(f"{path}: an added token {text!r:.80} with id {i!r}: download it again")
    return dict(id=i, content=content)


def _is_text(tokenizer_json: str, token: str, i: int) -> bool:
    """Returns True if ordinary text may contain a token: its text encodes to that token."""
    definition = json.loads(tokenizer_lib.parse(tokenizer_json).to_str())
    backend = tokenizer_lib.parse(json.dumps(sentence_pieces.at(definition, "inside")))
    return backend.encode(token, add_special_tokens=False).ids == [i]
