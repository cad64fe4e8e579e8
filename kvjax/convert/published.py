"""A published model as kvjax's: its config, its parameters one layer at a time, its tokenizer.

    model = published.open("~/models/SmolLM2-135M")          # a folder of Hugging Face's
    model = published.open("~/models/SmolLM2-135M.gguf")     # or a GGUF file
    model.config.transformer                                 # what it is
    model.read(("segments", 0, "attention", "out"), 3)       # [N, H, D] of layer 3

What can be wrong with it is told when it is opened, before its data are read.
"""

from collections.abc import Mapping
import dataclasses

from etils import epath
import numpy as np
import tokenizers

from kvjax.convert import architectures
from kvjax.convert import gguf_file
from kvjax.convert import rules as rules_lib
from kvjax.convert.architectures import Family
from kvjax.convert.architectures import Options
from kvjax.convert.architectures import Sections
from kvjax.convert.rules import BLOCK
from kvjax.convert.rules import Path
from kvjax.convert.rules import Rule
from kvjax.convert.tensors import DTYPES
from kvjax.convert.tensors import json_object
from kvjax.convert.tensors import listed
from kvjax.convert.tensors import open_folder
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.errors import first_line
from kvjax.foundation.files import in_bucket
from kvjax.model.config import TransformerConfig


class Published:
    """A published model: nothing of its weights is in memory but what is asked for.

    Attributes:
      name: of the folder, or of the file without its ending.
      config: sections of a config.
      tokenizer_json: as in `tokenizer.json`.
      chat_template: in Jinja, or None.
      bos_token: the text of the token that opens a document, or None.
    """

    def __init__(
        self,
        source: epath.Path,
        options: Options,
        family: Family,
        tensors: Mapping,
        *,
        tokenizer_json: str,
        chat_template: str | None,
        bos_token: str | None,
    ):
        self.name = source.name.removesuffix(".gguf")
        self.tokenizer_json = tokenizer_json
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.config = _config(options, family)
        self._tensors = tensors
        self._weights = rules_lib.weights_of(self.config.transformer)
        self._rules = {
            path: rule
            for rule in _rules(family, tensors)
            if all(path in self._weights for path in rule.weights)
            for path in rule.weights
        }
        assert self._rules.keys() == self._weights.keys()
        check_vocabulary(source, tokenizer_json, self.config.vocab_size)
        self._check(source, family)

    @property
    def transformer(self) -> TransformerConfig:
        """What it computes."""
        return self.config.transformer

    @property
    def context(self) -> int:
        """Tokens that it was trained on."""
        return self.config.context

    def parameters(self) -> dict[Path, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every parameter, with all layers in front; dtypes are as published."""
        found = {}
        for path, weight in self._weights.items():
            stacked = path[: len(BLOCK)] == BLOCK
            front = (self._layers,) if stacked else ()
            found[path] = ((*front, *weight.shape), self._dtype(path))
        return found

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        """One parameter, in its published dtype; of one layer if it is a block's."""
        rule = self._rules[path]
        assert rule.in_block == (layer is not None)
        tensor = self._tensors[rule.tensor.format(i=layer)].read()
        weights = [self._weights[each] for each in rule.weights]
        found = rules_lib.from_tensor(rule, tensor, weights)[rule.weights.index(path)]
        return np.ascontiguousarray(found, self._dtype(path))

    @property
    def _layers(self) -> int:
        return self.config.model["num_layers"]

    def _names(self, rule: Rule) -> list[str]:
        """The tensors of a rule, in the order of the layers."""
        return [rule.tensor.format(i=i) for i in range(self._layers if rule.in_block else 1)]

    def _dtype(self, path: Path) -> np.dtype:
        """That of all layers, or the narrowest that holds theirs."""
        kinds = {self._tensors[name].dtype for name in self._names(self._rules[path])}
        return np.dtype(DTYPES[kinds.pop()] if len(kinds) == 1 else np.float32)

    def _check(self, source: epath.Path, family: Family) -> None:
        """Raises a UserError unless the tensors are those of the config, in dtypes of weights."""
        rules = {}  # by tensor
        for rule in dict.fromkeys(self._rules.values()):
            rules |= dict.fromkeys(self._names(rule), rule)
        copy = self._copy_of_embedding(family)
        for name in (*rules, copy):
            if name in self._tensors and self._tensors[name].dtype not in DTYPES:
                raise UserError(
                    f"{source}: {name} is stored as {self._tensors[name].dtype}; weights must be "
                    f"{', '.join(DTYPES)}: load the model with transformers, dequantise it and save"
                    " it in bfloat16 first"
                )
        missing = [name for name in rules if name not in self._tensors]
        unknown = [
            name
            for name in self._tensors
            if name not in rules and name != copy and not architectures.is_buffer(family, name)
        ]
        for names, what in (
            (missing, "lacks tensors that its config describes"),
            (unknown, "has tensors that its config does not describe"),
        ):
            if names:
                raise UserError(
                    f"{source} {what}: {listed(names)}. Give the files of one model, as published"
                )
        for name, rule in rules.items():
            weights = [self._weights[path] for path in rule.weights]
            asked, there = rules_lib.tensor_shape(rule, weights), self._tensors[name].shape
            if asked != there:
                raise UserError(
                    f"{source}: {name} has shape {there}, and by its config {asked}: give the "
                    "config that belongs to the weights"
                )
        if copy is not None:
            self._check_copy(source, copy)

    def _copy_of_embedding(self, family: Family) -> str | None:
        """The name of a head that is stored although it is the embedding."""
        heads = [rule.tensor for rule in family.rules if rule.weights == (("head",),)]
        tied = ("head",) not in self._weights
        return next((name for name in heads if tied and name in self._tensors), None)

    def _check_copy(self, source: epath.Path, copy: str) -> None:
        embedding = self._rules[("embedding",)].tensor
        if not np.array_equal(self._tensors[copy].read(), self._tensors[embedding].read()):
            raise UserError(
                f"{source}: tie_word_embeddings is set, and {copy} is not {embedding}: set it to "
                "false in the config if the head is a weight of its own, or remove the tensor"
            )


def open(source: epath.PathLike) -> Published:
    """The model of a local folder (config.json, safetensors, tokenizer.json), or a GGUF file.

    Raises:
      UserError: no such model, files that are missing, cut off or do not belong together, a family
        or an option that kvjax does not compute, weights that are quantised (but in GGUF).
    """
    path = runtime.path("--source", source)
    if in_bucket(path):
        raise UserError(f"--source = {str(source)!r}: must be local: copy it to a disk first")
    if not path.exists():
        raise UserError(
            f"--source = {str(source)!r}: there is no such folder or file; download a published "
            "model first, and give its folder or its .gguf file"
        )
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: epath.Path) -> Published:
    file = gguf_file.File(path)
    return Published(
        path,
        file.options(),
        file.family(),
        file.tensors,
        tokenizer_json=file.tokenizer_json(),
        chat_template=file.chat_template,
        bos_token=file.bos_token,
    )


def _open_folder(folder: epath.Path) -> Published:
    options = Options(json_object(folder / "config.json"), str(folder / "config.json"))
    family = architectures.family_of(options)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        raise UserError(
            f"{tokenizer} is missing: load the tokenizer with transformers (AutoTokenizer) and "
            "save it beside the weights with save_pretrained"
        )
    about = folder / "tokenizer_config.json"
    about = json_object(about) if about.exists() else {}
    return Published(
        folder,
        options,
        family,
        open_folder(folder),
        tokenizer_json=text_of(tokenizer),
        chat_template=_chat_template(folder / "chat_template.jinja", about.get("chat_template")),
        bos_token=_token(about.get("bos_token")),
    )


def _chat_template(path: epath.Path, other) -> str | None:
    """The template of a file, or what tokenizer_config.json has: one, or several by name."""
    if path.exists():
        return text_of(path)
    if isinstance(other, list):
        named = {each.get("name"): each.get("template") for each in other if isinstance(each, dict)}
        other = named.get("default")
    return other if isinstance(other, str) else None


def _token(value) -> str | None:
    """A token of tokenizer_config.json: its text, or an object with that."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def text_of(path: epath.Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}): download it again"
        ) from error


def _rules(family: Family, tensors: Mapping) -> list[Rule]:
    """The rules by the names that are there: a model saved without its head has no prefix."""
    if any(name.startswith(family.prefix) for name in tensors):
        return list(family.rules)
    without = lambda rule: rule.tensor.removeprefix(family.prefix)
    return [dataclasses.replace(rule, tensor=without(rule)) for rule in family.rules]


def _config(options: Options, family: Family) -> Sections:
    try:
        config = family.sections(options)
        config.transformer.check_length(config.context)
    except UserError as error:
        text = str(error)
        raise UserError(text if options.source in text else f"{options.source}: {text}") from error
    return config


def check_vocabulary(source: epath.Path, tokenizer_json: str, rows: int) -> None:
    """Raises a UserError for a tokenizer that cannot be read, or has ids beyond the embedding."""
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{source}: its tokenizer.json cannot be read ({first_line(error)}): download it again"
        ) from error
    tokens = 1 + max(backend.get_vocab().values(), default=-1)
    if tokens > rows:
        raise UserError(
            f"{source}: its tokenizer has {tokens} tokens and its embedding {rows} rows: give the "
            "tokenizer that belongs to the weights"
        )
