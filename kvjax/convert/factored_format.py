"""The factored format: safetensors that keep a model's factors, so that its cache stays small.

Tensors have kvjax's dotted parameter names, with layers numbered throughout:
"layers.3.attention.mechanism.latent_key". config.json has the sections model and attention of
kvjax's config; README.md describes the tensors. Digests of tensors and files detect damage
(`digests`); exports of older versions have none.

    model = factored_format.FactoredModel(folder)  # reads one parameter of one layer at a time
"""

import dataclasses
import json

from etils import epath
import ml_collections
import numpy as np

from kvjax import config as config_lib, recipes
from kvjax.convert import digests
from kvjax.convert.published import check_tokenizer, check_vocabulary, text_of
from kvjax.convert.tensors import check, dtype_of, json_object, open_folder
from kvjax.data import manifest
from kvjax.foundation.configuration import checked
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path
from kvjax.published import source as source_lib
from kvjax.workdir import origin

MODEL_TYPE = "kvjax"  # in config.json
VERSION = 1


def is_there(path: epath.Path) -> bool:
    """Returns True if a folder's config.json names this format."""
    config = path / "config.json"
    if in_bucket(path) or not config.exists():
        return False
    return json_object(config).get("model_type") == MODEL_TYPE


def name_of(config: TransformerConfig, path: Path, layer: int | None) -> str:
    """Returns the tensor name of a parameter, or of one layer of a segment."""
    if layer is None:
        return ".".join(map(str, path))
    before = sum(length for _, length in config.layer_groups[: path[1]])
    return ".".join(map(str, ("layers", before + layer, *path[2:])))


def config_json(model: TransformerConfig, attention: dict, *, context: int) -> str:
    """Returns the text of config.json.

    Args:
      attention: the config section that describes the model's mechanisms.
    """
    config = dict(
        model_type=MODEL_TYPE,
        format_version=VERSION,
        model=dataclasses.asdict(model.block),
        attention=attention,
        vocab_size=model.vocab_size,
        context=context,
    )
    return json.dumps(config, indent=2) + "\n"


class FactoredModel:
    """The model of a folder in this format; see `model.LazyModel`."""

    def __init__(self, folder: epath.Path):
        """Opens the folder and checks everything but the tensors' values.

        Raises:
          UserError: the format has another version, keys or tensors are unknown, or files are
            missing or damaged.
        """
        self.name = source_lib.name(folder)
        self.transformer, self.context = _config(folder)
        self.tokenizer_json = text_of(folder / manifest.TOKENIZER)
        check_vocabulary(folder, self.tokenizer_json, self.transformer.vocab_size)
        self.chat_template = origin.chat_template(folder)
        self.token_files = origin.token_files(folder)
        check_tokenizer(folder, self.tokenizer_json)
        self._tensors = open_folder(folder)
        self._shapes = parameters.shapes(self.transformer)
        self._check(folder)
        digests.check_files(folder)  # last: the checks above give more specific messages

    def parameters(self) -> dict[Path, tuple[tuple[int, ...], np.dtype]]:
        return {path: (shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        name = name_of(self.transformer, path, layer)
        return np.asarray(self._tensors[name].read(), self._dtype(path))

    def _names(self, path: Path) -> list[str]:
        """Returns the names of a parameter's tensors, in the order of the layers."""
        layers = range(self._shapes[path][0]) if path[0] == "segments" else (None,)
        return [name_of(self.transformer, path, layer) for layer in layers]

    def _dtype(self, path: Path) -> np.dtype:
        return dtype_of(self._tensors[name] for name in self._names(path))

    def _check(self, folder: epath.Path) -> None:
        """Raises a UserError unless tensors have the names, shapes and dtypes of the config."""
        shapes = {}
        for path, shape in self._shapes.items():
            own = shape[1:] if path[0] == "segments" else shape
            shapes |= dict.fromkeys(self._names(path), own)
        check(folder, self._tensors, shapes)


def _config(folder: epath.Path) -> tuple[TransformerConfig, int]:
    """Returns the model's config and its training context length."""
    path = folder / "config.json"
    tree = json_object(path)
    version = tree.get("format_version")
    if version != VERSION:
        raise UserError(
            f"{path}: format_version = {version!r}: must be {VERSION} in this version of kvjax: "
            "export the model again, or read it with the version that wrote it"
        )
    try:
        context = checked(tree.get("context"), int, "context")
        vocab_size = checked(tree.get("vocab_size"), int, "vocab_size")
        data = dict(tokenizer=manifest.TOKENIZER, vocab_size=vocab_size, sequence_length=context)
        sections = {key: checked(tree.get(key), dict, key) for key in ("model", "attention")}
        config = recipes.pretrain("exported", scale="tiny", attention=sections["attention"])
        config.unlock()
        config.model = ml_collections.ConfigDict(sections["model"])
        config.data.update(data)
        return config_lib.resolve(config).model, context
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error
