"""Gemma 2 and the text models of Gemma 3."""

from collections.abc import Mapping
import dataclasses

from kvjax.convert import rules as rules_lib
from kvjax.convert.families import LlamaFamily, is_close
from kvjax.convert.published_config import ConfigSections
from kvjax.convert.rules import Rule
from kvjax.model.config import TransformerConfig
from kvjax.published.config import PublishedConfig

_SCALE, _CAP, _BIDIRECTIONAL = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaFamily(LlamaFamily):
    """Models that normalise inputs and outputs of attention and MLP, with gains 1 + weight.

    Attributes:
      attention_softcap: default of attn_logit_softcapping; 0: transformers ignores the key.
    """

    activations: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "geglu")
    )
    activation_key: str = "hidden_activation"
    rules: tuple[Rule, ...] = rules_lib.gemma_rules()
    head_dim: int | None = 256
    tied: bool = True
    attention_softcap: float = 0.0

    @property
    def keys(self) -> frozenset[str]:
        return super().keys | {_SCALE, _CAP, _BIDIRECTIONAL, "hidden_activation"}

    def sections(self, c: PublishedConfig) -> ConfigSections:
        if c.flag(_BIDIRECTIONAL, False):
            raise c.error(_BIDIRECTIONAL, "must be false: tokens see earlier tokens only")
        return super().sections(c)

    def _more(self, c: PublishedConfig) -> dict:
        return dict(
            norm_both=True,
            norm_offset=True,
            embedding_scale=c.integer("hidden_size") ** 0.5,
            attention_softcap=self._attention_softcap(c),
        )

    def _attention_softcap(self, c: PublishedConfig) -> float:
        if self.attention_softcap:
            return 0.0 if _CAP in c.nulls else c.number(_CAP, self.attention_softcap)
        if _CAP in c.values:
            raise c.error(_CAP, "must be null: attention of this family has no soft cap")
        return 0.0

    def _logit_scale(self, c: PublishedConfig, head_dim: int) -> float:
        scalar = c.number(_SCALE, 256.0)
        if scalar <= 0:
            raise c.error(_SCALE, "must be more than 0")
        scale = scalar**-0.5
        return 0.0 if is_close(scale, head_dim**-0.5) else scale

    def config_json(self, model: TransformerConfig, context: int) -> dict:
        cap = model.block.attention_softcap
        return super().config_json(model, context) | {
            _SCALE: round(model.mechanisms[0].scale ** -2),
            _CAP: cap or None,
        }
