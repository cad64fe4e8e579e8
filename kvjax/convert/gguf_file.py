"""A GGUF file: config, tokenizer and tensors under Hugging Face's names."""

from collections.abc import Callable
import dataclasses
import re

from etils import epath
import gguf
import numpy as np
import tokenizers

from kvjax.convert import digests, pieces
from kvjax.convert.architectures import FAMILIES
from kvjax.convert.families import Family
from kvjax.convert.tensors import StoredTensor
from kvjax.data.fast_encoding import PUBLISHED_SPLITS
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, first_line, panics_as_errors
from kvjax.layers import rope
from kvjax.published import gguf_header
from kvjax.published.config import PublishedConfig

_, _LLAMA3_SPLIT, _QWEN2_SPLIT = PUBLISHED_SPLITS
_FREQUENCIES = "rope_freqs.weight"  # divisors of RoPE's frequencies
# Llama 3's further parameters, which the divisors do not determine.
_SCALING = dict(low=1.0, high=4.0, original=8192)
_NO_TENSOR = "(?!)"  # a pattern that never matches
# Allowed values of RoPE's scaling keys: an absent type is linear, and a factor of 0 means 1.
_UNSCALED = {
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
}
_UNUSED_SCALING = tuple(  # llama.cpp always writes these, and reads them for YaRN only
    f"rope.scaling.{key}" for key in ("original_context_length", "finetuned", "yarn_log_multiplier")
)

# GGUF's keys, without the architecture's prefix ("llama."), by transformers' keys.
_LLAMA_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
_GPT2_KEYS = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "n_positions": "context_length",
}
# By architecture, which has the same names as transformers' model_type.
_KEYS = dict(gpt2=_GPT2_KEYS) | dict.fromkeys(("llama", "qwen2", "qwen3"), _LLAMA_KEYS)


class File:
    """A memory-mapped GGUF file; tensors are dequantised one at a time.

    Raises:
      UserError: see `gguf_header.read`; or the architecture or quantisation is unknown.
    """

    def __init__(self, path: epath.Path):
        self.path = path
        digests.check_download(path)
        self.metadata, tensors = gguf_header.read(path)
        self.architecture = self.metadata.get("general.architecture")
        one_of(f"{path}: general.architecture", self.architecture, tuple(_KEYS))
        self.tensors = {tensor.name: self._stored(tensor) for tensor in tensors}

    def _stored(self, tensor: gguf.ReaderTensor) -> StoredTensor:
        _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the "
                "package gguf does not support: give the file in F16, or another quantisation"
            ) from error

        def load():
            return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)

        shape = tuple(int(size) for size in reversed(tensor.shape))
        return StoredTensor(self.path, tensor.name, shape, "F32", load)

    # -- the config --------------------------------------------------------------------------------

    def options(self) -> PublishedConfig:
        """Returns the config under transformers' keys."""
        prefix = f"{self.architecture}."
        metadata = {
            key.removeprefix(prefix): _shortest(value)
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }
        keys, head_dim = _KEYS[self.architecture], _head_dim(metadata)
        self._check(metadata, keys, head_dim)
        values = {key: metadata[name] for key, name in keys.items() if name in metadata}
        values |= dict(
            model_type=self.architecture,
            vocab_size=self._rows("token_embd.weight"),
            tie_word_embeddings="output.weight" not in self.tensors,
        )
        if "attention_bias" in FAMILIES[self.architecture].keys:
            values["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
        if _FREQUENCIES in self.tensors and self._has_frequencies and head_dim is not None:
            base = values.get("rope_theta", 10_000.0)
            values["rope_scaling"] = self._scaling(base, head_dim)
        names = {key: prefix + name for key, name in keys.items()}
        return PublishedConfig(values, str(self.path), names)

    @property
    def _has_frequencies(self) -> bool:
        """True if llama.cpp reads RoPE's divisors for this architecture."""
        return self.architecture == "llama"

    def _check(self, metadata: dict, keys: dict[str, str], head_dim: int | None) -> None:
        """Raises a UserError for metadata that changes the model in an unknown way."""
        allowed_values = _UNSCALED | {"attention.causal": (True,)}
        allowed_values |= dict.fromkeys(
            ("attention.value_length", "rope.dimension_count"), (head_dim,)
        )
        if self.architecture == "gpt2":
            allowed_values["attention.head_count_kv"] = (metadata.get("attention.head_count"),)
        known = [*keys.values(), *allowed_values, *_UNUSED_SCALING, "vocab_size"]
        for name, value in metadata.items():
            if allowed_values.get(name) == (None,):  # `PublishedConfig` reports the missing key
                continue
            if name in allowed_values and value not in allowed_values[name]:
                values = " or ".join(map(repr, allowed_values[name]))
                allowed = f"kvjax supports only {values}"
                if name in _UNSCALED:
                    allowed += f": RoPE must be unscaled, or scaled by the tensor {_FREQUENCIES}"
            elif name not in known:
                allowed = f"is unknown, and may change the model; known: {', '.join(known)}"
            else:
                continue
            raise UserError(f"{self.path}: {self.architecture}.{name} = {value!r}: {allowed}")

    def _rows(self, name: str) -> int | None:
        return self.tensors[name].shape[0] if name in self.tensors else None

    def _scaling(self, base: float, head_dim: int) -> dict:
        """Returns the parameters of Llama 3's RoPE scaling, recovered from the stored divisors."""
        stored = self.tensors[_FREQUENCIES]
        divisors = stored.read()
        factor = _shortest(float(divisors.max()))
        scaled = rope.frequencies(head_dim, rope.Llama3(base, factor, **_SCALING))
        expected = rope.frequencies(head_dim, base) / scaled
        same_shape = divisors.shape == expected.shape
        if not same_shape or not np.allclose(expected, divisors, rtol=1e-4, atol=0):
            raise UserError(
                f"{self.path}: {_FREQUENCIES} is not Llama 3's scaling of {len(expected)} channel "
                f"pairs with factor {factor:g} and {_SCALING}: kvjax supports no other"
            )
        return dict(
            rope_type="llama3",
            factor=factor,
            low_freq_factor=_SCALING["low"],
            high_freq_factor=_SCALING["high"],
            original_max_position_embeddings=_SCALING["original"],
        )

    def family(self) -> Family:
        """Returns the family with GGUF's tensor names and layouts.

        Matrices are [out, in]. Only llama's queries and keys have interleaved pairs.
        """
        family = FAMILIES[self.architecture]
        by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(by_name[self.architecture], 1)
        rules = []
        for rule in family.rules:
            name = names.get_name(rule.tensor.format(i=0), try_suffixes=(".weight", ".bias"))
            if name is None:  # llama has no query and key norms
                continue
            rotated = rule.weights[0][-1] in ("query", "base_key", "query_bias", "base_key_bias")
            layout = dict(transposed=True, interleaved=rotated and self.architecture == "llama")
            tensor = name.replace("blk.0.", "blk.{i}.")
            rules.append(dataclasses.replace(rule, tensor=tensor, **layout))
        buffers = re.escape(_FREQUENCIES) if self._has_frequencies else _NO_TENSOR
        return dataclasses.replace(family, rules=tuple(rules), prefix="", buffers=buffers)

    # -- the tokenizer -----------------------------------------------------------------------------

    def tokenizer_json(self) -> str:
        """Returns the tokenizer in the format of `tokenizer.json`.

        Raises:
          UserError: the tokenizer is neither a byte-level BPE nor SentencePiece, or its
            pre-tokenizer is unknown.
        """

        def get(key):
            return self.metadata.get(f"tokenizer.ggml.{key}")

        # llama.cpp's names of a byte-level BPE and of SentencePiece.
        one_of(f"{self.path}: tokenizer.ggml.model", get("model"), ("gpt2", "llama"))
        if get("model") == "llama":
            return self._sentencepiece(get)
        one_of(f"{self.path}: tokenizer.ggml.pre", get("pre"), tuple(_PRE_TOKENIZERS))
        tokens, merges = get("tokens") or [], get("merges") or []
        kinds = get("token_type") or [gguf.TokenType.NORMAL] * len(tokens)
        try:
            numbered = [
                (token, i, kind)
                for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                # Padding rows of the embedding are not tokens.
                if not (kind == gguf.TokenType.UNUSED and token == f"[PAD{i}]")
            ]
            with panics_as_errors():
                backend = tokenizers.Tokenizer(
                    tokenizers.models.BPE(
                        vocab={token: i for token, i, _ in numbered},
                        merges=[tuple(merge.split(" ", 1)) for merge in merges],
                        ignore_merges=get("pre") in _LLAMA3,
                    )
                )
                for token, _, kind in numbered:
                    added = tokenizers.AddedToken(token, normalized=False)
                    if kind == gguf.TokenType.CONTROL:
                        backend.add_special_tokens([added])
                    elif kind == gguf.TokenType.USER_DEFINED:
                        backend.add_tokens([added])
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"{self.path}: tokenizer.ggml.tokens, .token_type and .merges are not a BPE "
                f"({first_line(error)}): download the file again"
            ) from error
        backend.pre_tokenizer = _PRE_TOKENIZERS[get("pre")]
        backend.decoder = tokenizers.decoders.ByteLevel()
        return backend.to_str()

    def _sentencepiece(self, get: Callable) -> str:
        """Returns a tokenizer of SentencePiece, which llama.cpp calls "llama"."""
        try:
            rows = zip(get("tokens"), get("scores"), get("token_type"), strict=True)
            known = [pieces.Piece(text, score, pieces.Kind(kind)) for text, score, kind in rows]
            while known and known[-1].text == f"[PAD{len(known) - 1}]":
                known.pop()  # padding rows of the embedding are not tokens
            prefix = get("add_space_prefix")
            return pieces.tokenizer_json(known, has_prefix=prefix is None or bool(prefix))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.path}: tokenizer.ggml.tokens, .scores and .token_type are not "
                f"SentencePiece's ({first_line(error)}): download the file again"
            ) from error

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None


def _head_dim(metadata: dict) -> int | None:
    """Returns the channels of a key head from a file's metadata, or None."""
    heads, width = metadata.get("attention.head_count"), metadata.get("embedding_length")
    divisible = type(heads) is type(width) is int and heads > 0
    dim = metadata.get("attention.key_length", width // heads if divisible else None)
    return dim if type(dim) is int else None


def _shortest(value):
    """Returns a float32 as the shortest decimal: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _pre_tokenizer(first: tokenizers.pre_tokenizers.PreTokenizer | None):
    """Returns a first step followed by byte-level pre-tokenization.

    The latter splits words as in GPT-2, unless the first step splits them.
    """
    steps = tokenizers.pre_tokenizers
    splits_words = isinstance(first, steps.Split)
    byte_level = steps.ByteLevel(add_prefix_space=False, use_regex=not splits_words)
    return byte_level if first is None else steps.Sequence([first, byte_level])


def _split(pattern: str) -> tokenizers.pre_tokenizers.Split:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")


# By tokenizer.ggml.pre: llama.cpp's names (src/llama-vocab.cpp) for equal pre-tokenization.
_LLAMA3 = (  # words in the vocabulary are not merged
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split()
)
_PRE_TOKENIZERS = (
    dict.fromkeys(
        "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion".split(),
        _pre_tokenizer(None),
    )
    | dict.fromkeys(
        [*_LLAMA3, *"dbrx smaug-bpe glm4 chatglm-bpe".split()],
        _pre_tokenizer(_split(_LLAMA3_SPLIT)),
    )
    | dict.fromkeys(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan".split(),
        _pre_tokenizer(_split(_QWEN2_SPLIT)),
    )
    | dict.fromkeys(
        "smollm starcoder refact command-r codeshell exaone minerva-7b".split(),
        _pre_tokenizer(tokenizers.pre_tokenizers.Digits(individual_digits=True)),
    )
)
