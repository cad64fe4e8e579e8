"""Measures head diversity in every layer."""

import dataclasses

from kvjax.analysis.measures import diversity, heads as heads_lib, spectrum
from kvjax.analysis.measures.diversity import Diversity
from kvjax.analysis.words import mechanism_names
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation import json_text
from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelDiversity:
    """Head diversity of a model, by layer.

    Attributes:
      num_distances: number of relative positions that `rotated` is averaged over.
      plain: diversity of the forms W_Q W_K^T without positions.
      rotated: the same with RoPE; None if the model has no RoPE.
      values: diversity of the forms W_V W_O.
    """

    label: str
    mechanism: str
    num_distances: int
    plain: list[Diversity]
    rotated: list[Diversity] | None
    values: list[Diversity]

    @property
    def num_layers(self) -> int:
        return len(self.plain)

    @property
    def num_heads(self) -> tuple[int, ...]:
        """Distinct numbers of heads, ascending."""
        return tuple(sorted({layer.num_heads for layer in self.plain}))


def check(model: LazyModel) -> None:
    """Raises a UserError if a layer has only one head, or heads that are not linear."""
    for index, config in enumerate(model.transformer.mechanisms):
        try:
            diversity.check(config.query_heads)
        except UserError as error:
            raise UserError(f"layer {index} of {model.name}: {error}") from error
    heads_lib.check(model)


def of_model(label: str, model: LazyModel) -> ModelDiversity:
    """Measures head diversity in every layer, one layer at a time."""
    plain, rotated, values = [], [], []
    rotates = [kind.rope_base is not None for kind in model.transformer.block.layer_kinds]
    with few_threads(model.transformer.block.d_model):
        for heads, has_rope in zip(heads_lib.layers(model), rotates, strict=True):
            plain_layer, rotated_layer = diversity.plain_and_rotated(heads, "key", model.context)
            plain.append(plain_layer)
            rotated.append(rotated_layer if has_rope else plain_layer)
            values.append(diversity.of_layer(heads, "value"))
    names = mechanism_names(model.transformer.mechanisms)
    rotated = rotated if any(rotates) and all(rotated) else None
    return ModelDiversity(label, names, model.context, plain, rotated, values)


def numbers(model: ModelDiversity) -> dict:
    """Returns a model's measurements, JSON-able."""
    kinds = dict(key=model.plain, key_with_rope=model.rotated or [], value=model.values)
    return json_text.plain(
        dict(
            mechanism=model.mechanism,
            distances=model.num_distances if model.rotated else None,
            **{name: list(map(_numbers, layers)) for name, layers in kinds.items()},
        )
    )


def _numbers(layer: Diversity) -> dict:
    names = ("rank", "share", "centred_rank", "centred_share", "centred_share_of_possible")
    return {name: getattr(layer, name) for name in (*names, "mean_similarity")} | dict(
        components={f"{share:g}": layer.components(share) for share in spectrum.SHARES},
        uncentred=layer.uncentred_N,
        centred=layer.centred_N,
        similarity=layer.similarity_NN,
        gram=layer.gram_NN,
        nothing=layer.nothing,
    )
