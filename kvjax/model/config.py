"""Frozen configs of a Transformer: everything that parameters' shapes depend on."""

import dataclasses
import itertools

from kvjax.attention.mechanism import MechanismConfig
from kvjax.foundation.configuration import between, one_of
from kvjax.foundation.errors import UserError
from kvjax.layers import norm, rope
from kvjax.model.layer_kinds import LayerKind

POSITIONS = ("rope", "learned", "sinusoidal", "none")
ROPE_SCALINGS = ("llama3", "yarn", "linear")
# Limits far above any real model, so that a typo in a size does not end in "out of memory".
_MAX_SIZES = {
    "num_layers": 10_000,
    "d_model": 1 << 20,
    "mlp_dim": 1 << 22,
    "max_positions": 1 << 24,
    "rope_original": 1 << 24,
}
LATENT_CHANNELS = 512  # allowed in any model, since exports to engines pad latents to them
ACTIVATIONS = ("relu2", "relu", "gelu", "gelu_exact", "swiglu", "geglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Options of the Transformer; defaults are nanochat's (commit 0f00788)."""

    num_layers: int  # layers, L
    d_model: int  # width, D
    mlp_dim: int  # width of the MLP, M
    norm: str = "rms"  # "rms" or "layer"
    norm_gain: bool = False  # learned gains in the norms
    norm_bias: bool = False  # learned biases in the norms
    norm_epsilon: float = 1e-6  # added to the mean square (rms) or the variance (layer)
    norm_after: bool = False  # post-norm: norm(x + f(x)) instead of x + f(norm(x))
    norm_outputs: bool = False  # x + norm(f(x)) instead of x + f(norm(x)), as in OLMo 2
    norm_both: bool = False  # x + norm(f(norm(x))), as in Gemma 2
    norm_offset: bool = False  # gains of the norms are 1 + their weights, as in Gemma
    embedding_norm: bool = True  # norm after the embedding
    embedding_scale: float = 1.0  # factor on the embedding
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP, before they are added
    positions: str = "rope"  # "rope", "learned", "sinusoidal" (fixed, added) or "none"
    rope_base: float = 10_000.0  # base of RoPE's frequencies
    # Scaling: pairs with fewer than rope_low turns in rope_original tokens are slowed by
    # rope_factor, pairs with more than rope_high turns are unchanged, others interpolated.
    rope_factor: float = 1.0  # 1: no scaling
    rope_scaling: str = "llama3"  # "llama3" and "yarn" interpolate differently; "linear" slows all
    rope_low: float = 1.0  # turns
    rope_high: float = 4.0  # turns, more than rope_low
    rope_original: int = 8192  # tokens
    rope_fraction: float = 1.0  # partial RoPE: share of pairs that are rotated, at least one pair
    rope_attention_factor: float = 1.0  # YaRN's factor; its square multiplies logits
    rope_layers: tuple[int, ...] = ()  # by layer, 1: RoPE rotates, 0: no RoPE; (): all layers 1
    window: int = 0  # sliding window: tokens attended to, including the query's own; 0: no window
    window_layers: tuple[int, ...] = ()  # by layer, 1: has the window, 0: none; (): all layers 1
    window_rope_base: float = 0.0  # RoPE base of layers with the window, unscaled; 0: as in others
    attention_softcap: float = 0.0  # c in c·tanh(z/c) of attention's logits z; 0: none
    max_positions: int = 2048  # longest row, with learned positions
    # "relu2", "relu", "gelu" (tanh), "gelu_exact", or gated: "swiglu", "geglu" (tanh).
    activation: str = "relu2"
    dropout: float = 0.0  # dropout rate on outputs of attention and MLP, in training
    bias: bool = False  # biases in the MLP (attention has its own key)
    tied_head: bool = False  # the head is the embedding
    logit_divisor: float = 1.0  # the head's input is divided by it
    logit_softcap: float = 15.0  # c in c·tanh(z/c); 0: none
    causal: bool = True  # causal mask; training needs it
    embedding_std: float = 1.0  # initial standard deviation of embedding and learned positions
    matrix_std: float = 0.0  # initial standard deviation of matrices; 0: from fan in and fan out
    zero_outputs: bool = True  # attention.out, mlp.down and the head start at 0

    def __post_init__(self):
        for key, most in _MAX_SIZES.items():
            between(f"config.model.{key}", getattr(self, key), 1, most)
        between("config.model.logit_softcap", self.logit_softcap, 0.01, 1e6, zero="none")
        between("config.model.attention_softcap", self.attention_softcap, 0.01, 1e6, zero="none")
        between("config.model.logit_divisor", self.logit_divisor, 1e-6, 1e6)
        between("config.model.embedding_scale", self.embedding_scale, 1e-6, 1e6)
        between("config.model.residual_scale", self.residual_scale, 1e-6, 1e6)
        between("config.model.dropout", self.dropout, 0.0, 0.99)
        between("config.model.embedding_std", self.embedding_std, 0.0, 10.0)
        between("config.model.matrix_std", self.matrix_std, 0.0, 10.0)
        between("config.model.norm_epsilon", self.norm_epsilon, 0.0, 1.0)
        # Exports that pad RoPE's channels raise the base to a power, to 1e16 for example.
        between("config.model.rope_base", self.rope_base, 1.0, 1e38)
        between("config.model.rope_factor", self.rope_factor, 1.0, 1e6)
        between("config.model.rope_attention_factor", self.rope_attention_factor, 1e-3, 1e3)
        between(
            "config.model.window_rope_base",
            self.window_rope_base,
            1.0,
            1e38,
            zero="as in other layers",
        )
        one_of("config.model.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        between("config.model.rope_low", self.rope_low, 0.0, 1e6)
        between("config.model.rope_high", self.rope_high, 0.0, 1e6)
        between("config.model.rope_fraction", self.rope_fraction, 1e-6, 1.0)
        if not self.rope_low < self.rope_high:
            raise UserError(
                f"config.model.rope_high = {self.rope_high}: must be more than "
                f"config.model.rope_low = {self.rope_low}"
            )
        self._check_norms()
        between("config.model.window", self.window, 0, rope.MAX_POSITION)
        if self.window and not self.causal:
            raise UserError(
                f"config.model.window = {self.window}: needs config.model.causal = True; or set it "
                "to 0 (no window)"
            )
        one_of("config.model.norm", self.norm, norm.KINDS)
        one_of("config.model.positions", self.positions, POSITIONS)
        one_of("config.model.activation", self.activation, ACTIVATIONS)
        self._check_layers()

    def _check_norms(self) -> None:
        """Raises a UserError if more than one of the alternative norm placements is chosen."""
        places = [key for key in ("norm_after", "norm_outputs", "norm_both") if getattr(self, key)]
        if len(places) > 1:
            given, other = (f"config.model.{key}" for key in places[1::-1])
            raise UserError(f"{given} = True: must be False if {other} is True")

    def _check_layers(self) -> None:
        """Raises a UserError for bad values of rope_layers, window_layers and window_rope_base."""
        rotates = "config.model.positions = 'rope'", self.positions == "rope"
        has_window = "config.model.window > 0", self.window > 0
        for key, unset, needs in (
            ("rope_layers", (), rotates),
            ("window_layers", (), has_window),
            ("window_rope_base", 0, rotates),
            ("window_rope_base", 0, has_window),
        ):
            value, (needed, is_met) = getattr(self, key), needs
            if value != unset and not is_met:
                raise UserError(f"config.model.{key} = {value}: needs {needed}; or leave it out")
        for key in ("rope_layers", "window_layers"):
            value = getattr(self, key)
            if value and (len(value) != self.num_layers or not {*value} <= {0, 1}):
                raise UserError(
                    f"config.model.{key} = {value}: must have a 0 or a 1 for each of "
                    f"config.model.num_layers = {self.num_layers} layers"
                )
        if self.rope_scaling == "yarn" and self.rope_base == 1:
            raise UserError("config.model.rope_base = 1.0: must be more than 1 with YaRN")
        if self.rope_scaling == "yarn" and not self.rope_low:
            raise UserError("config.model.rope_low = 0.0: must be more than 0 with YaRN")

    @property
    def angles_base(self) -> rope.Base | None:
        """Frequencies of RoPE (see `rope.frequencies`), or None in a model without RoPE.

        Single layers may have another base or no RoPE; see `layer_kinds`.
        """
        if self.positions != "rope":
            return None
        base = self.rope_base
        if self.rope_factor != 1 and self.rope_scaling == "linear":
            base = rope.Linear(base, self.rope_factor)
        elif self.rope_factor != 1:
            scaling = rope.Yarn if self.rope_scaling == "yarn" else rope.Llama3
            base = scaling(
                base=self.rope_base,
                factor=self.rope_factor,
                low=self.rope_low,
                high=self.rope_high,
                original=self.rope_original,
            )
        return self._partial(base)

    def _partial(self, base: rope.Base) -> rope.Base:
        return base if self.rope_fraction == 1 else rope.Partial(base, self.rope_fraction)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        all_layers = (1,) * self.num_layers
        rotated, windowed = self.rope_layers or all_layers, self.window_layers or all_layers
        return tuple(map(self._layer_kind, rotated, windowed))

    def _layer_kind(self, rotated: int, windowed: int) -> LayerKind:
        window = self.window if windowed else 0
        if not rotated or self.positions != "rope":
            base, factor = None, 1.0
        elif window and self.window_rope_base:
            base, factor = self._partial(self.window_rope_base), 1.0
        else:
            base, factor = self.angles_base, self.rope_attention_factor**2
        return LayerKind(base, window, factor, self.attention_softcap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A whole model: options, the mechanism of every layer, vocabulary size."""

    block: BlockConfig
    mechanisms: tuple[MechanismConfig, ...]  # one per layer
    vocab_size: int  # V

    def __post_init__(self):
        if len(self.mechanisms) != self.block.num_layers:
            raise UserError(
                f"config.attention.layer_ranks describes {len(self.mechanisms)} layers and "
                f"config.model.num_layers = {self.block.num_layers}: give one rank per layer"
            )
        has_alibi = any(getattr(mechanism, "alibi", False) for mechanism in self.mechanisms)
        if has_alibi and self.block.positions != "none":
            raise UserError(
                f"config.attention.alibi = True: needs config.model.positions = 'none', not "
                f"{self.block.positions!r}: ALiBi replaces other position encodings"
            )
        if has_alibi and not self.block.causal:
            raise UserError(
                "config.attention.alibi = True: needs config.model.causal = True: without a "
                "causal mask the biases favour later tokens"
            )
        # In training these biases are extra channels of queries and keys, so a soft cap or a factor
        # on the logits would apply to the biases too.
        for key in ("alibi", "position_channels"):
            changed = {"attention_softcap": 0.0, "rope_attention_factor": 1.0}
            given = [name for name, plain in changed.items() if getattr(self.block, name) != plain]
            if given and any(getattr(m, key, False) for m in self.mechanisms):
                raise UserError(
                    f"config.model.{given[0]} = {getattr(self.block, given[0])}: must be "
                    f"{changed[given[0]]} with config.attention.{key}"
                )
        for layer, mechanism in enumerate(self.mechanisms):
            if self.block.causal and mechanism.needs_whole_rows:
                raise UserError(
                    f"config.model.causal = True: must be False, because attention of layer "
                    f"{layer} needs whole rows ({type(mechanism).__name__})"
                )
        for mechanism in self.mechanisms:
            for key, least in (("latent_dim", LATENT_CHANNELS), ("query_rank", 0)):
                channels, most = getattr(mechanism, key, 0), max(self.block.d_model, least)
                if channels > most:
                    raise UserError(
                        f"config.attention.{key} = {channels}: must be at most {most}; its input "
                        f"has config.model.d_model = {self.block.d_model} channels"
                    )
        for mechanism, kind in self.layers:
            if kind.rope_base is not None and mechanism.rope_dim % 2:
                raise UserError(
                    f"config.attention: RoPE rotates channels in pairs, and a key has "
                    f"{mechanism.rope_dim} rotated channels: make key_dim (or rope_key_dim) even, "
                    "or set config.model.positions"
                )

    @property
    def layers(self) -> tuple[tuple[MechanismConfig, LayerKind], ...]:
        """The mechanism and the kind of every layer."""
        return tuple(zip(self.mechanisms, self.block.layer_kinds, strict=True))

    @property
    def layer_groups(self) -> tuple[tuple[MechanismConfig, int], ...]:
        """Layer groups: consecutive layers with equal mechanisms, as (mechanism, num layers)."""
        runs = itertools.groupby(self.mechanisms)
        return tuple((mechanism, len(tuple(run))) for mechanism, run in runs)

    @property
    def angle_limit(self) -> int | None:
        """Number of positions that have angles; None in a model without angles."""
        fixed = self.block.positions in ("rope", "sinusoidal")
        has_angles = fixed or any(m.needs_angles for m in self.mechanisms)
        return rope.MAX_POSITION if has_angles else None

    def check_length(self, length: int) -> None:
        """Raises a UserError if the model cannot encode the positions of rows of this length."""
        learned = self.block.max_positions if self.block.positions == "learned" else None
        limits = [limit for limit in (learned, self.angle_limit) if limit is not None]
        if limits and length > min(limits):
            raise UserError(
                f"config.data.sequence_length = {length}: {self.block.positions} positions reach "
                f"{min(limits)} tokens"
            )
