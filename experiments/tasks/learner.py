"""Trains small models that label positions or rows; one compiled program serves all seeds.

A program scans over a chunk of steps; otherwise small models would wait for the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.attention import GroupedConfig
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig, TransformerConfig

Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Adam, or AdamW with weight decay, under a learning-rate schedule.

    Attributes:
      warm_up: steps of linear warm-up from 0.
      decay: "cosine" to 0 (multiplied with the warm-up, as in UvA's course), "steps" (x 0.1 after
        half, x 0.01 after three quarters of the steps) or "none".
      clip: global norm at which gradients are clipped; 0: no clipping.
    """

    steps: int
    learning_rate: float
    warm_up: int = 0
    decay: str = "cosine"
    clip: float = 0.0
    weight_decay: float = 0.0

    def rate(self, step: jax.Array) -> jax.Array:
        """Returns the learning rate of a step, counted from 0."""
        factor = jnp.minimum(1.0, step / self.warm_up) if self.warm_up else 1.0
        if self.decay == "cosine":
            factor *= 0.5 * (1 + jnp.cos(math.pi * step / self.steps))
        elif self.decay == "steps":
            share = step / self.steps
            factor *= jnp.where(share < 0.5, 1.0, jnp.where(share < 0.75, 0.1, 0.01))
        elif self.decay != "none":
            raise ValueError(f"decay = {self.decay!r}: must be 'cosine', 'steps' or 'none'")
        return self.learning_rate * factor

    def optimizer(self) -> optax.GradientTransformation:
        clip = [optax.clip_by_global_norm(self.clip)] if self.clip else []
        return optax.chain(*clip, optax.adamw(self.rate, weight_decay=self.weight_decay))


_CLASSIC = dict(norm_gain=True, norm_bias=True, norm_epsilon=1e-5, embedding_norm=False)
_CLASSIC |= dict(bias=True, norm="layer", logit_softcap=0.0, zero_outputs=False)


def classic_block(num_layers: int, d_model: int, **keys) -> BlockConfig:
    """Returns a config of classic blocks: LayerNorm, biases, no logit cap."""
    return BlockConfig(num_layers=num_layers, d_model=d_model, **_CLASSIC | keys)


def classic(
    labels: int,
    width: int,
    layers: int,
    heads: int,
    *,
    make: type[GroupedConfig] = GroupedConfig,
    attention: Mapping[str, object],
    **block,
) -> TransformerConfig:
    """Returns a Transformer of classic blocks with multi-head attention.

    Args:
      attention: keys of `make`, with a `key_dim` other than width/heads for thin keys.
      block: keys of `BlockConfig`.
    """
    sizes = dict(num_heads=heads, num_kv_heads=heads, num_bases=heads, rank=0, qk_norm="none")
    sizes |= dict(key_dim=width // heads, value_dim=width // heads)
    mechanisms = (make(**sizes | dict(attention)),) * layers
    config = classic_block(layers, width, **block)
    return TransformerConfig(block=config, mechanisms=mechanisms, vocab_size=labels)


def check_channels(channels: Sequence[int], width: int, heads: int) -> None:
    """Raises a UserError unless --channels are multiples of the heads, up to the width."""
    for count in channels:
        if count % heads or count > width:
            raise UserError(
                f"--channels: {count} must be a multiple of the {heads} heads, up to {width}"
            )


def nats(z_X_V: jax.Array, labels_X: jax.Array) -> jax.Array:
    """Returns the cross-entropy of logits [..., V] in nats, in the shape of the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(z_X_V, labels_X)


def loss_and_accuracy(logits: Callable) -> tuple[Callable, Callable]:
    """Returns the functions `loss` and `right` of a `Learner` that predicts labels.

    Both average over the labels that the batch's `counts` marks, or over all.

    Args:
      logits: (model, batch, dropout key or None) -> logits of the batch's labels `y`.
    """

    def loss(model, batch, key):
        losses = nats(logits(model, batch, key), batch["y"])
        if "counts" not in batch:
            return jnp.mean(losses)
        return jnp.sum(losses * batch["counts"]) / jnp.sum(batch["counts"])

    def right(model, batch):
        predicted = jnp.argmax(logits(model, batch, None), axis=-1)
        counts = batch["counts"] if "counts" in batch else jnp.ones(batch["y"].shape)
        return predicted == batch["y"], counts

    return loss, right


class Learner:
    """Initialisation, training and evaluation of a model, compiled once for all seeds.

    Args:
      make: key -> model.
      loss: (model, batch, dropout key or None) -> scalar.
      right: (model, batch) -> per label, True if the prediction is correct, and True if the label
        counts. The first may be another figure than correctness.
      chunk: steps per dispatch.
      has_dropout: the loss uses a dropout key.
    """

    def __init__(
        self,
        make: Callable[[jax.Array], nnx.Module],
        recipe: Recipe,
        loss: Callable[[nnx.Module, Batch, jax.Array | None], jax.Array],
        right: Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array]],
        *,
        chunk: int = 20,
        has_dropout: bool = False,
    ):
        self.recipe, self._chunk = recipe, chunk
        optimizer = recipe.optimizer()
        graph = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))[0]

        @jax.jit
        def init(key):
            params = nnx.to_pure_dict(nnx.state(make(key)))
            return params, optimizer.init(params)

        def step(carry, batch):
            params, state, key = carry
            key, own = jax.random.split(key) if has_dropout else (key, None)

            def loss_of(params):
                return loss(nnx.merge(graph, params), batch, own)

            value, gradients = jax.value_and_grad(loss_of)(params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state, key), value

        @functools.partial(jax.jit, donate_argnums=0)
        def steps(carry, batches):
            return jax.lax.scan(step, carry, batches)

        @jax.jit
        def judge(params, batch):
            correct, counts = right(nnx.merge(graph, params), batch)
            return jnp.sum(correct * counts), jnp.sum(counts)

        self._init, self._steps, self._judge = init, steps, judge

    def train(
        self,
        seed: int,
        batches: Iterator[Batch],
        evaluate: Callable[["Trained"], None] = lambda _: None,
        every: int = 0,
    ) -> "Trained":
        """Trains for the recipe's steps.

        Args:
          batches: one per step, of equal shapes.
          evaluate: called every `every` steps.
        """
        params, state = self._init(jax.random.key(seed))
        carry = (params, state, jax.random.key(seed + 1_000_003))
        steps_done, losses = 0, []
        while steps_done < self.recipe.steps:
            count = min(self._chunk, self.recipe.steps - steps_done)
            if every:
                count = min(count, every - steps_done % every)
            chunk = [next(batches) for _ in range(count)]
            stacked = {name: np.stack([batch[name] for batch in chunk]) for name in chunk[0]}
            carry, values = self._steps(carry, stacked)
            losses.append(values)
            steps_done += count
            if every and steps_done % every == 0:
                evaluate(self._trained(carry[0], losses))
        return self._trained(carry[0], losses)

    def curve(
        self, seed: int, batches: Iterator[Batch], held_out: Sequence[Batch], every: int
    ) -> tuple[dict[int, float], "Trained"]:
        """Trains a model; returns its accuracy on held-out batches by step, and the model."""
        curve: dict[int, float] = {}

        def evaluate(snapshot: Trained) -> None:
            curve[snapshot.steps] = self.accuracy(snapshot, held_out)

        trained = self.train(seed, batches, evaluate, every)
        return curve, trained

    def best(
        self,
        seed: int,
        batches: Iterator[Batch],
        validation: Sequence[Batch],
        test: Sequence[Batch],
        every: int,
        *,
        lower: bool = False,
    ) -> tuple[float, int, dict[int, float], float]:
        """Trains a model and tests it where its validation is best.

        Args:
          lower: the lowest figure is the best.

        Returns:
          The test figure, its step, validation by step, and the last loss.
        """
        sign = -1 if lower else 1
        curve: dict[int, float] = {}
        best = (0.0, 0)

        def evaluate(snapshot: Trained) -> None:
            nonlocal best
            figure = self.accuracy(snapshot, validation)
            if all(sign * figure > sign * earlier for earlier in curve.values()):
                best = self.accuracy(snapshot, test), snapshot.steps
            curve[snapshot.steps] = figure

        trained = self.train(seed, batches, evaluate, every)
        return *best, curve, trained.loss

    @staticmethod
    def _trained(params: dict, losses: Sequence[jax.Array]) -> "Trained":
        """Waits for the losses; raises a FloatingPointError if one is not finite."""
        losses_S = np.concatenate([np.asarray(chunk) for chunk in losses])
        bad = np.flatnonzero(~np.isfinite(losses_S))
        if len(bad):
            raise FloatingPointError(f"the loss is not finite from step {bad[0] + 1} on")
        return Trained(params, losses_S)

    def accuracy(self, trained: "Trained", batches: Sequence[Batch]) -> float:
        """Returns the mean of `right` over counted labels: the accuracy, unless it is redefined."""
        sums = [self._judge(trained.params, batch) for batch in batches]
        return float(sum(right for right, _ in sums) / sum(count for _, count in sums))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model: parameters, and the loss of each step."""

    params: dict
    losses: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The last step's loss."""
        return float(self.losses[-1])

    def curve(self, every: int) -> list[float]:
        """Returns the mean loss of every `every` steps; the last mean may cover fewer."""
        parts = range(0, self.steps, every)
        return [round(float(np.mean(self.losses[i : i + every])), 5) for i in parts]


def in_order(arrays: Batch, batch: int, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of shuffled epochs; an epoch's incomplete last batch is dropped."""
    count = len(next(iter(arrays.values())))
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(count)
        for i in range(0, count - batch + 1, batch):
            chosen = order[i : i + batch]
            yield {name: x[chosen] for name, x in arrays.items()}


def split(arrays: Batch, batch: int) -> list[dict[str, np.ndarray]]:
    """Splits rows into batches in order; the last may be smaller."""
    count = len(next(iter(arrays.values())))
    return [{name: x[i : i + batch] for name, x in arrays.items()} for i in range(0, count, batch)]
