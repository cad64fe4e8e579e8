"""A folder of safetensors that keeps a model's factors, and with them its small cache.

Tensors have the dotted names of kvjax's parameters, with layers numbered through:
"layers.3.attention.mechanism.latent_key". config.json has the sections model and attention of a
workdir's, README.md says what they mean. Digests of tensors and files reveal damage (`digests`);
exports of older kvjax have none.

    model = factored_format.FactoredModel(folder)  # reads one parameter of one layer at a time
"""

import dataclasses
import json

from etils import epath
import ml_collections
import numpy as np

from kvjax import experiment, recipes
from kvjax.convert import digests, source as source_lib
from kvjax.convert.published import check_tokenizer, check_vocabulary, text_of
from kvjax.convert.tensors import check, dtype_of, json_object, open_folder
from kvjax.data import manifest
from kvjax.foundation.configuration import checked
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path
from kvjax.workdir import origin

MODEL_TYPE = "kvjax"  # in config.json
VERSION = 1


def is_there(path: epath.Path) -> bool:
    """Whether a folder says that it has this format."""
    config = path / "config.json"
    if in_bucket(path) or not config.exists():
        return False
    return json_object(config).get("model_type") == MODEL_TYPE


def name_of(config: TransformerConfig, path: Path, layer: int | None) -> str:
    """The tensor of a parameter, or of a layer of a segment's."""
    if layer is None:
        return ".".join(map(str, path))
    before = sum(length for _, length in config.layer_groups[: path[1]])
    return ".".join(map(str, ("layers", before + layer, *path[2:])))


def config_json(model: TransformerConfig, attention: dict, *, context: int) -> str:
    """The text of config.json.

    Args:
      attention: the section that describes the model's mechanisms.
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
    """The model of such a folder: see `model.Model`."""

    def __init__(self, folder: epath.Path):
        """
        Raises:
          UserError: another version, keys or tensors that are not its own, files that are missing
            or have other bytes than were written.
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
        self._axes = parameters.axes(self.transformer)
        self._check(folder)
        digests.check_files(folder)  # last: what is wrong otherwise is told more exactly

    def parameters(self) -> dict[Path, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every parameter, layers of a segment in front."""
        return {path: (shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        """One parameter; of a segment that of one of its layers."""
        name = name_of(self.transformer, path, layer)
        return np.asarray(self._tensors[name].read(self._axes[path]), self._dtype(path))

    def _names(self, path: Path) -> list[str]:
        """The tensors of a parameter, in the order of the layers."""
        layers = range(self._shapes[path][0]) if path[0] == "segments" else (None,)
        return [name_of(self.transformer, path, layer) for layer in layers]

    def _dtype(self, path: Path) -> np.dtype:
        return dtype_of(self._tensors[name] for name in self._names(path))

    def _check(self, folder: epath.Path) -> None:
        """Raises a UserError unless the tensors are those of the config, in dtypes of weights."""
        shapes = {}
        for path, shape in self._shapes.items():
            own = shape[1:] if path[0] == "segments" else shape
            shapes |= dict.fromkeys(self._names(path), own)
        check(folder, self._tensors, shapes)


def _config(folder: epath.Path) -> tuple[TransformerConfig, int]:
    """What a folder's model computes, and the tokens that it was trained on."""
    path = folder / "config.json"
    tree = json_object(path)
    version = tree.get("format_version")
    if version != VERSION:
        raise UserError(
            f"{path}: format_version = {version!r}: must be {VERSION}, the one that this kvjax "
            "reads: export the model again, or read it with the kvjax that wrote it"
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
        return experiment.resolve(config).model, context
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error
