"""A model whose factors are multiplied out to keys and values of MHA, GQA or MQA.

K_k = Base^K[j(k)] + R^K_k B^K_k    # LRKV eq. 2, as one matrix per KV head
K_k = C^K[j(k)] B^K_k               # thin keys, section 2.3

In published models keys and values of a head have equal width: narrower values are padded with zero
channels. Narrower keys are padded, too, unless RoPE or a norm would treat the padding as channels.
"""

import dataclasses

import numpy as np

from kvjax.attention import FactoredConfig, GroupedConfig, kind_of
from kvjax.attention.mechanism import MechanismConfig, check_convertible, require
from kvjax.convert import model as model_lib
from kvjax.convert.model import LazyModel, Parameters
from kvjax.model import parameters
from kvjax.model.config import BlockConfig
from kvjax.model.parameters import Path

_MECHANISM = ("attention", "mechanism")
_EXPANDED = {"base_key": "key", "base_value": "value"}


class DenseModel:
    """A `model.LazyModel`. Weights that were factored are float32, the others as in the source.

    All layers have one shape, so they form one segment.
    """

    def __init__(self, source: LazyModel):
        """Raises a UserError unless each head's keys and values are projections of the input and
        all layers have one shape.
        """
        self._source = source
        self.name, self.context = source.name, source.context
        self.tokenizer_json, self.chat_template = source.tokenizer_json, source.chat_template
        self.token_files = source.token_files
        config = source.transformer
        for mechanism, _ in config.layer_groups:
            _check(mechanism, rope=config.block.positions == "rope")
        heads = max(mechanism.key_heads for mechanism in config.mechanisms)
        mechanisms = tuple(_dense(mechanism, heads) for mechanism in config.mechanisms)
        _check_equal_shapes(mechanisms)
        key_dim = mechanisms[0].key_dim
        mechanisms = tuple(_with_equal_widths(mechanism, config.block) for mechanism in mechanisms)
        self._scale = (mechanisms[0].key_dim / key_dim) ** 0.5  # factor on queries, see `_padded`
        self.transformer = dataclasses.replace(config, mechanisms=mechanisms)
        self._dtypes = {path: dtype for path, (_, dtype) in source.parameters().items()}

    @property
    def is_source(self) -> bool:
        """True if nothing was factored, so that parameters are the source's."""
        parts = _EXPANDED.values()
        mechanisms = self._source.transformer.mechanisms
        return not any(_names(mechanism, part)[1] for mechanism in mechanisms for part in parts)

    def parameters(self) -> Parameters:
        shapes = parameters.shapes(self.transformer)
        return {path: (shape, self._dtype(path)) for path, shape in shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        if layer is None:
            return self._source.read(path)
        if self._is_expanded(path):
            w = self._expand(path, layer)
        else:
            w = model_lib.read_parameter(self._source, layer, *path[2:])
        return np.asarray(self._padded(path, w), self._dtype(path))

    def _is_expanded(self, path: Path) -> bool:
        """Returns True for weights and biases of keys and values, which may be factors."""
        return path[2:4] == _MECHANISM and path[4].removesuffix("_bias") in _EXPANDED

    def _dtype(self, path: Path) -> np.dtype:
        is_query = path[2:4] == _MECHANISM and path[4].removesuffix("_bias") == "query"
        if (is_query and self._scale != 1) or (self._is_expanded(path) and not self.is_source):
            return np.dtype(np.float32)
        return self._dtypes[path]

    def _padded(self, path: Path, w: np.ndarray) -> np.ndarray:
        """Pads a layer's parameter with zero channels, see the module's docstring.

        Queries are also scaled, because the mechanism divides logits by the root of all channels.
        """
        name = path[-1].removesuffix("_bias")
        mechanism = self.transformer.mechanisms[0]
        widths = dict(
            query=mechanism.key_dim, base_key=mechanism.key_dim, base_value=mechanism.value_dim
        )
        if path[2:] == ("attention", "out"):
            return _pad_channels(w, mechanism.value_dim, axis=-2)
        if path[2:4] != _MECHANISM or name not in widths:
            return w
        if name == "query" and self._scale != 1:
            w = w.astype(np.float64) * self._scale
        return _pad_channels(w, widths[name], axis=-1)

    def _expand(self, path: Path, index: int) -> np.ndarray:
        """Returns [..., K, H] weights or biases of keys or values; products are in float64."""
        mechanism = self._source.transformer.mechanisms[index]
        whole, bias, _ = path[4].partition("_bias")
        base, latent = _names(mechanism, _EXPANDED[whole])
        K = self.transformer.mechanisms[index].num_kv_heads

        def read(name):
            return model_lib.read_parameter(self._source, index, *_MECHANISM, name)

        parts = [_repeat_heads(read(base + bias), K)] if base else []
        if latent and (not bias or getattr(mechanism, "latent_bias", True)):
            expand_KRH = read(f"expand_{_EXPANDED[whole]}").astype(np.float64)
            latent_KDR = np.moveaxis(_repeat_heads(read(latent + bias), K), -2, 0)
            if bias:
                latent_KDR = latent_KDR[:, None]
            expanded = np.matmul(latent_KDR.astype(np.float64), expand_KRH).swapaxes(0, 1)
            parts.append(expanded[0] if bias else expanded)
        return sum(parts[1:], start=parts[0])


def _pad_channels(w: np.ndarray, dim: int, *, axis: int) -> np.ndarray:
    """Pads an axis with zeros to `dim`."""
    if w.shape[axis] == dim:
        return w
    padding = [(0, 0)] * w.ndim
    padding[axis] = (0, dim - w.shape[axis])
    return np.pad(w, padding)


def _repeat_heads(w: np.ndarray, K: int) -> np.ndarray:
    """Repeats [..., J, H] to [..., K, H]: head k gets base or latent k // (K / J)."""
    return w if w.shape[-2] == K else np.repeat(w, K // w.shape[-2], axis=-2)


def _names(mechanism: GroupedConfig | FactoredConfig, part: str) -> tuple[str, str]:
    """Returns the parameter names of base and latent of keys or values; "" for one they lack."""
    if isinstance(mechanism, GroupedConfig):
        return f"base_{part}", f"latent_{part}" if mechanism.rank else ""
    rank = mechanism.key_rank if part == "key" else mechanism.value_rank
    return ("", part) if rank else (part, "")


def _check(mechanism: MechanismConfig, *, rope: bool) -> None:
    """Raises a UserError unless each head's keys and values are projections of the input."""
    grouped = isinstance(mechanism, GroupedConfig)
    known = "must be 'grouped' or 'factored': keys and values are a projection per head"
    require(
        grouped or isinstance(mechanism, FactoredConfig), "kind", repr(kind_of(mechanism)), known
    )
    check_convertible(mechanism, "transformers' models have nothing like it")
    if not grouped:
        return
    rope_only = "positions come from RoPE only"
    for key, allowed, reason in (
        ("tie", "none", "queries, keys and values have separate projections"),
        ("position_channels", 0, rope_only),
        ("alibi", False, rope_only),
    ):
        value = getattr(mechanism, key)
        require(value == allowed, key, repr(value), f"must be {allowed!r}: {reason}")
    splits_rope = rope and mechanism.splits_rope
    require(
        not splits_rope, "rope", repr(mechanism.rope), "must be 'full': RoPE rotates whole keys"
    )


def _dense(mechanism: GroupedConfig | FactoredConfig, heads: int) -> GroupedConfig:
    kept_keys = ("num_heads", "key_dim", "value_dim", "qk_norm", "bias", "out_bias", "norm_epsilon")
    keys = {key: getattr(mechanism, key) for key in kept_keys}
    keys["logit_scale"] = getattr(mechanism, "logit_scale", 0.0)
    return GroupedConfig(**keys, num_kv_heads=heads, num_bases=heads, rank=0)


def _with_equal_widths(mechanism: GroupedConfig, block: BlockConfig) -> GroupedConfig:
    """Returns the mechanism with keys and values of equal width, as published models have."""
    key, value = mechanism.key_dim, mechanism.value_dim
    if block.positions == "rope" or mechanism.qk_norm != "none":
        return dataclasses.replace(mechanism, value_dim=max(key, value))
    dim = max(key, value, block.d_model // mechanism.num_heads)
    return dataclasses.replace(mechanism, key_dim=dim, value_dim=dim)


def _check_equal_shapes(mechanisms: tuple[GroupedConfig, ...]) -> None:
    """Raises a UserError for layers of different shapes."""
    first = dataclasses.asdict(mechanisms[0])
    for index, mechanism in enumerate(mechanisms):
        for key, value in dataclasses.asdict(mechanism).items():
            allowed = f"must be {first[key]!r} as in layer 0: all layers have one shape"
            require(value == first[key], key, f"{value!r} in layer {index}", allowed)
