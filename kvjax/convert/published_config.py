"""A published config.json as sections of kvjax's config."""

import dataclasses

from kvjax.attention import MECHANISMS
from kvjax.attention.mechanism import MechanismConfig
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.recipes import mechanisms


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
        mechanism = MECHANISMS[self.attention["kind"]](**keys)
        by_layer = (mechanism,) * block.num_layers
        return TransformerConfig(block=block, mechanisms=by_layer, vocab_size=self.vocab_size)


def make_sections(
    block: BlockConfig, mechanism: MechanismConfig, *, vocab_size: int, context: int
) -> ConfigSections:
    """Builds the sections of a model whose layers all have one mechanism."""
    attention = mechanisms.section(mechanism)
    return ConfigSections(dataclasses.asdict(block), attention, vocab_size, context)
