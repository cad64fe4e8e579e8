"""Reads a published model: its config, its parameters one layer at a time, its tokenizer.

    model = published.open("~/models/SmolLM2-135M")          # a Hugging Face folder
    model = published.open("~/models/SmolLM2-135M.gguf")     # or a GGUF file
    model = published.open("hf://HuggingFaceTB/SmolLM2-135M")    # or a model of the hub
    model.transformer                                        # its config
    model.read(("segments", 0, "attention", "out"), 3)       # [N, H, D] of layer 3

`open` finds every problem before it reads data, except values that are not finite.
"""

from collections.abc import Collection, Mapping
import dataclasses
import os
import re

from etils import epath
import numpy as np
import tokenizers

from kvjax.conversation.jinja_process import LimitError
from kvjax.conversation.template import Template
from kvjax.convert import architectures, pieces, rules as rules_lib, tokens
from kvjax.convert.families import Family
from kvjax.convert.published_config import ConfigSections
from kvjax.convert.rules import BLOCK, Rule
from kvjax.convert.tensors import check, dtype_of, json_object, open_folder
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation import extras, runtime
from kvjax.foundation.errors import DataError, UserError, first_line, say, warn
from kvjax.foundation.files import in_bucket
from kvjax.foundation.text import listed
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path
from kvjax.published import hub, source as source_lib
from kvjax.published.config import PublishedConfig
from kvjax.workdir.origin import CHAT_TEMPLATE, TOKENIZER_CONFIG, TokenFiles

# Limit on embedding rows without a token: a number, or a share of all rows if that is more.
_SPARE_ROWS, _SPARE_SHARE = 1024, 0.05


class PublishedModel:
    """A published model; weights are read one at a time.

    Attributes:
      name: name of the folder, or of the file without its suffix.
      config: the published config as sections of kvjax's config.
      tokenizer_json: content of `tokenizer.json`.
      chat_template: the Jinja template, or None.
      token_files: special tokens as the source's files name them, see `tokens`.

    Args:
      named: texts of special tokens that the source names, with or without an id.
    """

    def __init__(
        self,
        source: epath.Path,
        options: PublishedConfig,
        family: Family,
        tensors: Mapping,
        *,
        tokenizer_json: str,
        chat_template: str | None,
        token_files: TokenFiles,
        named: Collection[str] = (),
    ):
        self.name = source_lib.name(source)
        self.chat_template = chat_template
        self.token_files = token_files
        self.config = _config(options, family)
        self._tensors = tensors
        self._stored = rules_lib.weights_of(self.config.transformer)
        self.config = _with_added_rows(
            source, self.config, tokenizer_json, chat_template, token_files
        )
        self._weights = rules_lib.weights_of(self.config.transformer)
        self._rules = {
            path: rule
            for rule in _rules(family, tensors)
            if all(path in self._weights for path in (*rule.weights, *rule.beside))
            for path in rule.weights
        }
        assert self._rules.keys() == self._weights.keys()
        check_vocabulary(source, tokenizer_json, self.config.vocab_size)
        self.tokenizer_json = tokenizer_lib.opened_by(tokenizer_json, self.bos_token)
        check_tokenizer(source, self.tokenizer_json)
        if chat_template is not None:
            self.tokenizer_json = self._with_control_tokens(source, chat_template, named)
        self._check(source, family)

    def _with_control_tokens(
        self, source: epath.Path, chat_template: str, named: Collection[str]
    ) -> str:
        """Returns the tokenizer.json in which each control token of the chat template is one token.

        Raises:
          UserError: the template writes a named token that has no id, or exceeds its limits.
        """
        tokenizer = tokenizer_lib.from_json(self.tokenizer_json, str(source))
        try:
            template = Template(tokenizer, chat_template, self.token_files, extra_tokens=named)
        except LimitError as error:
            raise UserError(f"{source}: {error}") from error
        except UserError:  # an invalid template: reported when it is used
            return self.tokenizer_json
        if template.missing:
            raise UserError(
                f"{source}: its chat template writes {', '.join(template.missing)}, which has no "
                f"id in any file: download tokenizer.json and {tokens.ADDED_TOKENS} again, from "
                "the same model"
            )
        completed = template.tokenizer.to_json()
        return self.tokenizer_json if completed == tokenizer.to_json() else completed

    @property
    def transformer(self) -> TransformerConfig:
        """The model's config."""
        return self.config.transformer

    @property
    def bos_token(self) -> str | None:
        """Text of the token that opens a document, if the source names one."""
        return self.token_files.get(TOKENIZER_CONFIG, {}).get("bos_token")

    @property
    def context(self) -> int:
        """Training context length in tokens."""
        return self.config.context

    def parameters(self) -> dict[Path, tuple[tuple[int, ...], np.dtype]]:
        """Returns shape and published dtype of every parameter, with layers as the first axis."""
        by_path = {}
        for path, weight in self._weights.items():
            stacked = path[: len(BLOCK)] == BLOCK
            leading = (self._layers,) if stacked else ()
            by_path[path] = ((*leading, *weight.shape), self._dtype(path))
        return by_path

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        """Returns a parameter in its published dtype; of one layer if it belongs to a block.

        Raises:
          UserError: values are not finite.
        """
        rule = self._rules[path]
        assert rule.in_block == (layer is not None)
        stored = self._tensors[rule.tensor.format(i=layer)]
        weights = [self._stored[weight_path] for weight_path in rule.weights]
        tensor = stored.load()
        if rule.gain:
            gain = self._tensors[rule.gain.format(i=layer)]
            tensor = tensor.astype(np.float32) * gain.checked(gain.load().astype(np.float32))
        array = rules_lib.from_tensor(rule, tensor, weights)[rule.weights.index(path)]
        array = _append_mean_rows(array, self._weights[path].shape)
        array = np.ascontiguousarray(array, self._dtype(path))
        return stored.checked(array)

    @property
    def _layers(self) -> int:
        return self.config.model["num_layers"]

    def _names(self, rule: Rule, tensor: str = "") -> list[str]:
        """Returns the names of a rule's tensor, or of another one, in the order of the layers."""
        tensor = tensor or rule.tensor
        return [tensor.format(i=i) for i in range(self._layers if rule.in_block else 1)]

    def _dtype(self, path: Path) -> np.dtype:
        rule = self._rules[path]
        if rule.gain:  # narrower dtypes would round the product
            return np.dtype(np.float32)
        return dtype_of(self._tensors[name] for name in self._names(rule))

    def _check(self, source: epath.Path, family: Family) -> None:
        """Raises a UserError unless tensors have the names, shapes and dtypes of the config."""
        shapes = {}
        for rule in dict.fromkeys(self._rules.values()):
            weights = [self._stored[path] for path in rule.weights]
            shape = rules_lib.tensor_shape(rule, weights)
            shapes |= dict.fromkeys(self._names(rule), shape)
            if rule.gain:
                shapes |= dict.fromkeys(self._names(rule, rule.gain), shape[1:])
        copy = self._copy_of_embedding(family)
        if copy is not None:
            shapes[copy] = shapes[self._rules[("embedding",)].tensor]

        weights = {
            name: tensor
            for name, tensor in self._tensors.items()
            if not re.fullmatch(family.buffers, name)
        }
        check(source, weights, shapes)
        embedding = self._rules[("embedding",)].tensor
        if copy is not None and not np.array_equal(
            self._tensors[copy].read(), self._tensors[embedding].read()
        ):
            raise UserError(
                f"{source}: tie_word_embeddings is set, but {copy} differs from {embedding}: set "
                "it to false in the config if the head is a separate weight, or remove the tensor"
            )

    def _copy_of_embedding(self, family: Family) -> str | None:
        """Returns the name of a head that is stored although it is tied, or None."""
        heads = [rule.tensor for rule in family.rules if rule.weights == (("head",),)]
        tied = ("head",) not in self._weights
        return next((name for name in heads if tied and name in self._tensors), None)


def open(source: epath.PathLike) -> PublishedModel:
    """Opens a Hugging Face folder, a folder of the hub's cache, or a GGUF file.

    Raises:
      UserError: the model is missing, its files are missing, damaged or of different models, its
        family or an option is unsupported, or its weights are quantised (except in GGUF).
    """
    if hub.is_name(source):
        path = hub.model("--source", os.fspath(source))
    else:
        path = runtime.path("--source", source)
    if in_bucket(path):
        raise UserError(f"--source = {str(source)!r}: must be local: copy it to a disk first")
    if not path.exists():
        raise UserError(
            f"--source = {str(source)!r}: there is no such folder or file; download a published "
            "model first, and give its folder or .gguf file, or give hf://OWNER/NAME"
        )
    path = source_lib.model_path(path)
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: epath.Path) -> PublishedModel:
    extras.require(os.fspath(path), "gguf")
    from kvjax.convert import gguf_file

    file = gguf_file.File(path)
    return PublishedModel(
        path,
        file.options(),
        file.family(),
        file.tensors,
        tokenizer_json=tokens.completed(
            file.tokenizer_json(), tokens.named_in_gguf(file.metadata), path
        ),
        chat_template=file.chat_template,
        token_files=tokens.of_gguf(file.metadata),
    )


def _open_folder(folder: epath.Path) -> PublishedModel:
    options = PublishedConfig(json_object(folder / "config.json"), str(folder / "config.json"))
    family = architectures.family_of(options)
    source_lib.check_tokenizer_file(folder)
    about = folder / TOKENIZER_CONFIG
    about = json_object(about) if about.exists() else {}
    named, path = tokens.named_in_folder(folder), folder / "tokenizer.json"
    return PublishedModel(
        folder,
        options,
        family,
        open_folder(folder),
        tokenizer_json=tokens.completed(
            text_of(path) if path.exists() else pieces.read(folder / pieces.FILE),
            named,
            path,
            tokens.added(folder),
        ),
        chat_template=_chat_template(folder / CHAT_TEMPLATE, about.get("chat_template")),
        token_files=tokens.of_folder(folder, options.values),
        named=named,
    )


def _chat_template(path: epath.Path, configured) -> str | None:
    """Returns the template file's text, else the default template of tokenizer_config.json."""
    if path.exists():
        return text_of(path)
    if isinstance(configured, list):
        by_name = {
            template.get("name"): template.get("template")
            for template in configured
            if isinstance(template, dict)
        }
        configured = by_name.get("default")
    return configured if isinstance(configured, str) else None


def text_of(path: epath.Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}): download it again"
        ) from error


def _rules(family: Family, tensors: Mapping) -> list[Rule]:
    """Returns the family's rules, without its prefix if the model was saved without a head."""
    if any(name.startswith(family.prefix) for name in tensors):
        return list(family.rules)
    return [
        dataclasses.replace(rule, tensor=rule.tensor.removeprefix(family.prefix))
        for rule in family.rules
    ]


def _config(options: PublishedConfig, family: Family) -> ConfigSections:
    try:
        config = family.sections(options)
        config.transformer.check_length(config.context)
    except UserError as error:
        text = str(error)
        raise UserError(text if options.source in text else f"{options.source}: {text}") from error
    return config


def _with_added_rows(
    source: epath.Path,
    config: ConfigSections,
    tokenizer_json: str,
    chat_template: str | None,
    token_files: TokenFiles,
) -> ConfigSections:
    """Returns a config whose embedding has a row for every added token of the tokenizer.

    A token without a row, such as padding, is one that the published model never uses. It gets the
    mean of the existing rows (`_append_mean_rows`), and a warning names it.

    Raises:
      UserError: a token without a row opens or ends a text, or the chat template writes it.
    """
    backend, rows = _parsed(source, tokenizer_json), config.vocab_size
    beyond = {token for token, i in backend.get_vocab().items() if i >= rows}
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    if not beyond or len(beyond) > _SPARE_ROWS or not beyond <= added.keys():
        return config  # `check_vocabulary` reports the mismatch
    missing = sorted(beyond, key=added.get)
    special_tokens = token_files.get(TOKENIZER_CONFIG, {})
    for token in missing:
        if token in (
            special_tokens.get("bos_token"),
            special_tokens.get("eos_token"),
            tokenizer_lib.BOS,
        ):
            use = "opens or ends a text"
        elif token in (chat_template or ""):
            use = "is written by the chat template"
        else:
            continue
        raise UserError(
            f"{source}: its embedding has {rows} rows and none for {token}, which {use}: give "
            "weights that were trained with it"
        )
    warn(
        f"{source}: its embedding has {rows} rows and none for {listed(missing)}, which is unused: "
        "its row becomes the mean of the others"
    )
    return dataclasses.replace(config, vocab_size=1 + max(added[token] for token in missing))


def _append_mean_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Appends rows with the mean of the existing ones until the weight has `shape`."""
    for axis, (current, wanted) in enumerate(zip(array.shape, shape, strict=True)):
        if wanted > current:
            mean = array.mean(axis=axis, keepdims=True, dtype=np.float32).astype(array.dtype)
            array = np.concatenate([array, np.repeat(mean, wanted - current, axis=axis)], axis=axis)
    return array


def check_tokenizer(source: epath.Path, tokenizer_json: str) -> None:
    """Raises a UserError for a tokenizer that `data.tokenizer` cannot use."""
    try:
        tokenizer_lib.from_json(tokenizer_json, str(source))
    except DataError as error:
        raise UserError(
            f"{error} Give a model with such a tokenizer.json, whose {TOKENIZER_CONFIG} has a "
            "special token as bos_token"
        ) from error


def check_vocabulary(source: epath.Path, tokenizer_json: str, rows: int) -> None:
    """Raises a UserError for an unreadable tokenizer, or one that does not fit the embedding.

    Published embeddings may have spare rows, which belong to no token; a message says how many.
    """
    backend = _parsed(source, tokenizer_json)
    tokens = 1 + max(backend.get_vocab().values(), default=-1)
    if tokens > rows or rows - tokens > max(_SPARE_ROWS, _SPARE_SHARE * rows):
        raise UserError(
            f"{source}: its tokenizer has {tokens} tokens and its embedding {rows} rows: give the "
            "tokenizer that belongs to the weights"
        )
    if spare := rows - tokens:
        say(f"{source}: {spare} of its embedding's {rows} rows belong to no token; they are kept")


def _parsed(source: epath.Path, tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        return tokenizer_lib.parse(tokenizer_json)
    except DataError as error:
        raise UserError(f"{source}: its {error}: download it again") from error
