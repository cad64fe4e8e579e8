"""Writes a model as one of transformers' families: config.json, tensors, tokenizer.

Each family writes the config closest to the model, which is then read back like any published
config. If a key comes back with another value, the family cannot express the model.
"""

import dataclasses
import functools
import json

import numpy as np
import tokenizers

from kvjax.conversation.template import Template
from kvjax.convert import rules as rules_lib, tokens as tokens_lib
from kvjax.convert.architectures import FAMILIES
from kvjax.convert.dense import DenseModel
from kvjax.convert.into_folder import ExportPlan, LazyTensor
from kvjax.convert.model import LazyModel
from kvjax.convert.rules import Rule
from kvjax.data import manifest, tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.published.config import PublishedConfig
from kvjax.workdir import origin

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors': transformers'
# The token that ends a document, by the token that opens it; in order of preference.
_ENDS = {
    tokenizer_lib.BOS: tokenizer_lib.BOS,
    "<|begin_of_text|>": "<|end_of_text|>",
    "<bos>": "<eos>",
    "<s>": "</s>",
    "<|endoftext|>": "<|endoftext|>",
}


def plan(model: LazyModel, dtype: str) -> ExportPlan:
    """Returns the export of a model, with factors multiplied out, as the family that computes it.

    Args:
      dtype: safetensors' name of the tensors' dtype.

    Raises:
      UserError: no family computes the model; names the keys in which the closest one differs.
    """
    dense = DenseModel(model)
    kind, config = _family(dense.transformer, dense.context)
    return ExportPlan(
        title=FAMILIES[kind].class_name,
        transformer=dense.transformer,
        tensors=_tensors(dense, kind),
        files=files(dense, config, FAMILIES[kind].class_name, dtype),
    )


def files(model: LazyModel, config: dict, class_name: str, dtype: str) -> dict[str, str]:
    """Returns the text of every file without tensors: config.json, the tokenizer, its options.

    Args:
      config: keys of config.json that describe the model.
      class_name: transformers' class of the model.
      dtype: safetensors' name of the tensors' dtype.
    """
    texts, ids = _tokens(model)
    generation = model.token_files.get(origin.GENERATION_CONFIG)
    if unlisted := _unlisted_ends(model):
        listed = ids.get("eos")
        listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
        ids["eos"] = listed + unlisted
        generation = generation and dict(generation, eos_token_id=ids["eos"])
    config = config | dict(
        architectures=[class_name],
        dtype=DTYPES[dtype],
        torch_dtype=DTYPES[dtype],  # transformers 4
        bos_token_id=ids.get("bos"),
        eos_token_id=ids.get("eos"),
        pad_token_id=ids.get("pad"),
    )
    about = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        **{f"{name}_token": text for name, text in texts.items()},
        model_max_length=model.context,
        clean_up_tokenization_spaces=False,
    )
    if model.chat_template is not None:
        about["chat_template"] = model.chat_template
    trees = {"config.json": config, origin.TOKENIZER_CONFIG: about}
    if generation is not None:
        trees[origin.GENERATION_CONFIG] = generation
    contents = {name: json.dumps(tree, indent=2) + "\n" for name, tree in trees.items()}
    return contents | {manifest.TOKENIZER: _tokenizer(model.tokenizer_json, texts["bos"])}


# -- tensors ---------------------------------------------------------------------------------------


def _tensors(model: LazyModel, kind: str) -> dict[str, LazyTensor]:
    """Returns the tensors by published name, layer after layer."""
    weights = rules_lib.weights_of(model.transformer)
    rules = [rule for rule in FAMILIES[kind].rules if all(p in weights for p in rule.weights)]
    assert {path for rule in rules for path in rule.weights} == weights.keys()

    def read(rule: Rule, layer: int | None) -> np.ndarray:
        arrays = [model.read(path, layer) for path in rule.weights]
        return rules_lib.to_tensor(rule, arrays, [weights[path] for path in rule.weights])

    tensors = {}
    for layer in (None, *range(model.transformer.block.num_layers)):
        for rule in rules:
            if rule.in_block == (layer is not None):
                shape = rules_lib.tensor_shape(rule, [weights[path] for path in rule.weights])
                name = rule.tensor.format(i=layer)
                tensors[name] = LazyTensor(shape, functools.partial(read, rule, layer))
    return tensors


# -- configs ---------------------------------------------------------------------------------------


def _family(model: TransformerConfig, context: int) -> tuple[str, dict]:
    """Returns the model_type and config of the family that computes the model."""
    candidates = []
    for kind, family in FAMILIES.items():
        if not family.is_dense:
            continue
        config = dict(model_type=kind) | family.config_json(model, context)
        try:
            written = family.sections(PublishedConfig(config, "config.json")).transformer
        except UserError:  # the family cannot express it (GPT-2: heads must divide the width)
            continue
        candidates.append((_differences(model, written), kind, config))
    differences, kind, config = min(candidates, key=lambda candidate: len(candidate[0]))
    if differences:
        keys = "; ".join(differences)
        raise UserError(
            f"{keys} in {FAMILIES[kind].class_name}, the nearest of transformers' models"
        )
    return kind, config


def _differences(model: TransformerConfig, written: TransformerConfig) -> list[str]:
    """Returns the keys in which a model differs from another, with both values."""
    ours, theirs = _keys(model), _keys(written)
    return [
        f"{key} = {value!r}: must be {theirs[key]!r}"
        for key, value in ours.items()
        if key in theirs and theirs[key] != value
    ]


def _keys(config: TransformerConfig) -> dict:
    """Returns the config keys that determine a dense model's outputs, with their values."""
    block, mechanism = config.block, config.mechanisms[0]
    inactive = {"attention.num_bases", "attention.residual_init", "attention.rope"}
    # Initialisation and training only.
    inactive |= {"model.matrix_std", "model.zero_outputs", "model.embedding_std", "model.dropout"}
    angles = {f"model.rope_{key}" for key in ("low", "high", "original")}
    if block.positions != "rope":
        other = ("base", "factor", "fraction", "scaling")
        inactive |= angles | {f"model.rope_{key}" for key in other}
    elif block.rope_factor == 1 and block.rope_attention_factor == 1:
        inactive |= angles | {"model.rope_scaling"}
    elif block.rope_scaling == "linear":
        inactive |= angles
    if block.positions != "learned":
        inactive.add("model.max_positions")
    if not mechanism.bias:
        inactive.add("attention.out_bias")
    if mechanism.qk_norm == "none":
        inactive.add("attention.norm_epsilon")
    sections = dict(model=dataclasses.asdict(block), attention=dataclasses.asdict(mechanism))
    keys = {f"{name}.{key}": v for name, section in sections.items() for key, v in section.items()}
    return {f"config.{key}": value for key, value in keys.items() if key not in inactive}


# -- tokenizers ------------------------------------------------------------------------------------

Token = tuple[str, int] | None  # text, id


def _tokens(model: LazyModel) -> tuple[dict[str, str | None], dict[str, int | list[int] | None]]:
    """Returns texts and ids of special tokens, by kind.

    They are from the model's files, else those that open and end documents in kvjax.
    """
    document_tokens = zip(("bos", "eos"), _document_tokens(model.tokenizer_json), strict=True)
    texts = {kind: token and token[0] for kind, token in document_tokens}
    size = model.transformer.vocab_size
    texts |= tokens_lib.texts(model.token_files, model.tokenizer_json, size)
    backend = tokenizer_lib.parse(model.tokenizer_json)
    ids = {kind: backend.token_to_id(text or "") for kind, text in texts.items()}
    for kind in ids:
        if listed := origin.token_ids(model.token_files, kind, size):
            ids[kind] = listed if len(listed) > 1 else listed[0]
    return texts, ids


def _unlisted_ends(model: LazyModel) -> list[int]:
    """Returns the token that ends a turn of the chat template, if no file lists it as an end.

    Other engines stop at listed ends alone, and would go on after an answer.
    """
    if model.chat_template is None:
        return []
    tokenizer = tokenizer_lib.from_json(model.tokenizer_json, "the model's tokenizer")
    known = origin.token_ids(model.token_files, "eos", model.transformer.vocab_size)
    try:
        template = Template(tokenizer, model.chat_template, model.token_files)
    except UserError:  # an invalid template: reported when it is used
        return []
    return [end for end in template.tokenizer.ends if end not in {*tokenizer.ends, *known}]


def _document_tokens(tokenizer_json: str) -> tuple[Token, Token]:
    """Returns the tokens that open and end a document, by known names."""
    added = json.loads(tokenizer_json)["added_tokens"]
    ids = {token["content"]: token["id"] for token in added if token["special"]}
    bos = next((name for name in _ENDS if name in ids), None)
    if bos is None:
        return None, None
    eos = _ENDS[bos] if _ENDS[bos] in ids else bos
    return (bos, ids[bos]), (eos, ids[eos])


def _tokenizer(tokenizer_json: str, bos: str | None) -> str:
    """Returns tokenizer.json; adds BOS before texts to kvjax's own tokenizers, as in training."""
    if bos != tokenizer_lib.BOS or json.loads(tokenizer_json)["post_processor"]:
        return tokenizer_json
    backend = tokenizer_lib.parse(tokenizer_json)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A $B",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )
    return backend.to_str(pretty=False)
