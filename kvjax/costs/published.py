"""Reads a published model's shape from its config.json, or from the header of a GGUF file."""

from collections.abc import Mapping
import os

from kvjax.costs.shape import Shape, of_config
from kvjax.foundation import extras, json_text, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import matching_entries
from kvjax.published import hub, source as source_lib


def read(model: str) -> Shape:
    """Returns the shape of the model at a path or hub name.

    Args:
      model: a config.json, a folder with one, a GGUF file, a folder of the hub's cache, hf://...

    Raises:
      UserError: no such file, or its keys do not determine the cache.
    """
    try:
        return _read(model)
    except UserError as error:
        if "--model" in str(error):
            raise
        raise UserError(f"--model={model}: {error}") from error


def _read(model: str) -> Shape:
    path = hub.config("--model", model) if hub.is_name(model) else runtime.path("--model", model)
    if not path.exists():
        raise UserError(
            f"--model = {model!r}: there is no such file; give a config.json, a folder with one, a "
            "GGUF file, or hf://OWNER/NAME"
        )
    if path.suffix != ".json":
        path = source_lib.model_path(path)
    if path.is_dir():
        path = path / hub.CONFIG
    if path.suffix == ".json":
        values = json_text.read_object(path, "give a model's config.json, or its folder")
        folder = path.parent
        weights = matching_entries(folder, "*.safetensors")
        copies = [file for file in weights if file.name.startswith("consolidated")]
        if len(copies) < len(weights):  # Mistral's repositories have all weights twice
            weights = [file for file in weights if file not in copies]
        # A link may be broken.
        size = sum(os.stat(file).st_size for file in weights if file.exists())
        return of_config(values, str(path), name=source_lib.name(folder), weight_bytes=size)
    extras.require(os.fspath(path), "gguf")
    from kvjax.published import gguf_header

    metadata, _ = gguf_header.read(path)
    size = os.stat(path).st_size
    name = source_lib.name(path)
    return of_config(_gguf_values(metadata), str(path), name=name, weight_bytes=size)


# config.json's key: GGUF's key after the architecture's prefix.
_GGUF_KEYS = dict(
    num_hidden_layers="block_count",
    hidden_size="embedding_length",
    num_attention_heads="attention.head_count",
    num_key_value_heads="attention.head_count_kv",
    head_dim="attention.key_length",
    v_head_dim="attention.value_length",
    max_position_embeddings="context_length",
    sliding_window="attention.sliding_window",
    kv_lora_rank="attention.kv_lora_rank",
    intermediate_size="feed_forward_length",
)
_GGUF_FAMILIES = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gpt-oss": "gpt_oss"}


def _gguf_values(metadata: Mapping) -> dict:
    """Returns a GGUF file's metadata under config.json's keys."""
    family = metadata.get("general.architecture", "")
    stored = {key.removeprefix(f"{family}."): value for key, value in metadata.items()}
    values = {key: stored[name] for key, name in _GGUF_KEYS.items() if name in stored}
    values["model_type"] = _GGUF_FAMILIES.get(family, family)
    if "kv_lora_rank" in values:
        rope = stored.get("rope.dimension_count")
        key_dim = stored.get("attention.key_length_mla", values.pop("head_dim", None))
        values["v_head_dim"] = stored.get("attention.value_length_mla", values.get("v_head_dim"))
        if type(rope) is type(key_dim) is int:
            values |= dict(qk_rope_head_dim=rope, qk_nope_head_dim=key_dim - rope)
    return values
