"""A published config.json as sections of kvjax's config."""

import dataclasses

from kvjax.attention import MECHANISMS, GroupedConfig, MLAConfig
from kvjax.model.config import BlockConfig, TransformerConfig


@dataclasses.dataclass(frozen=True)
class ConfigSections:
    """A published config as sections of kvjax's config."""

    model: dict  # every key of BlockConfig
    attention: dict  # every key of the mechanism's config, kind and (if grouped) layer_ranks
    vocab_size: int  # rows of the embedding, at least the tokenizer's tokens
    context: int  # training context length in tokens

    @property
    def transformer(self) -> TransformerConfig:
        keys = {k: v for k, v in self.attention.items() if k not in ("kind", "layer_ranks")}
        block = BlockConfig(**self.model)
        mechanisms = (MECHANISMS[self.attention["kind"]](**keys),) * block.num_layers
        return TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=self.vocab_size)


def make_sections(
    block: BlockConfig, attention: dict, *, vocab_size: int, context: int
) -> ConfigSections:
    """Builds sections from keys of GroupedConfig: MHA, GQA or MQA without residuals."""
    mechanism = GroupedConfig(num_bases=attention["num_kv_heads"], rank=0, **attention)
    section = dict(kind="grouped", layer_ranks=()) | dataclasses.asdict(mechanism)
    return ConfigSections(dataclasses.asdict(block), section, vocab_size, context)


def make_mla_sections(
    block: BlockConfig, mechanism: MLAConfig, *, vocab_size: int, context: int
) -> ConfigSections:
    """Builds sections of a model with MLA."""
    section = dict(kind="mla") | dataclasses.asdict(mechanism)
    return ConfigSections(dataclasses.asdict(block), section, vocab_size, context)
