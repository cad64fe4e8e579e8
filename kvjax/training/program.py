"""The jitted programs of a run: initial state, training step, evaluation step."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.config import Experiment, TrainConfig
from kvjax.distributed import sharding
from kvjax.kernels.softmax_attention.api import zigzag
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.loss import distillation_loss, mean_loss, token_losses
from kvjax.model.transformer import Compute, Transformer, compute_dtypes
from kvjax.optim import make_optimizer, merge_trainable, trainable

MEAN_WEIGHT = 0.02  # weight of a step's loss in the running mean, which covers about 50 steps


class Program:
    """The jitted functions of a run on a mesh. A training state is a plain tree of arrays:

        params     the model's weights
        optimizer  optax state of the trainable weights
        step       int32, optimizer steps taken (skipped ones included)
        key        data of the random key made from the seed
        bad        counters of bad steps, see `check_step`

    Attributes:
      graph: the model without its parameters, for `nnx.merge`.
      abstract_state: ShapeDtypeStructs with shardings.
      abstract_rows: ShapeDtypeStruct of a step's rows [B, T + 1], with sharding.
      abstract_teacher: ShapeDtypeStructs of the teacher's parameters, in compute dtypes; None: no
        teacher.
      init: key -> state.
      train_step: (state, rows [B, T + 1]) -> (state, metrics); donates the state. With a teacher,
        its parameters are a third argument.
      eval_step: (params, rows, token_bytes [V]) -> sums, see `eval_step`.

    With a loss mask, a token that does not count as a target is stored as ~token (bitwise not); see
    `split_loss_mask`.
    """

    def __init__(
        self,
        experiment: Experiment,
        compute: Compute,
        mesh: jax.sharding.Mesh,
        teacher: TransformerConfig | None = None,
        bos_id: int = 0,
    ):
        """
        Args:
          teacher: config of the model to distil, which has the same vocabulary; None: no teacher.
          bos_id: the token that begins a document; used if `config.train.separate`.
        """
        model, train = experiment.model, experiment.train
        is_sharded = mesh.size > 1
        if is_sharded:
            compute = dataclasses.replace(compute, mesh=mesh)
        shapes, axes = parameters.abstract(model)
        select_trainable = functools.partial(trainable, experiment.optimizer)
        optimizer = make_optimizer(
            experiment.optimizer,
            select_trainable(axes),
            d_model=model.block.d_model,
            num_steps=train.num_steps,
            muon_dtype=compute.dtype,
            shardings=select_trainable(sharding.parameter_shardings(mesh, shapes, axes))
            if is_sharded
            else None,
        )

        def init(key: jax.Array) -> dict[str, Any]:
            params = nnx.to_pure_dict(nnx.state(Transformer(model, key)))
            return {
                "params": params,
                "optimizer": optimizer.init(select_trainable(params)),
                "step": jnp.zeros((), jnp.int32),
                "key": jax.random.key_data(key),
                "bad": {
                    "skipped": jnp.zeros((), jnp.int32),
                    "in_a_row": jnp.zeros((), jnp.int32),
                    "mean_loss": jnp.zeros((), jnp.float32),
                },
            }

        abstract = jax.eval_shape(init, jax.random.key(0))
        shardings = sharding.state_shardings(mesh, shapes, axes, abstract)
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )
        self.graph = parameters.graph(model)
        static = {
            "graph": self.graph,
            "compute": compute,
            "masked": experiment.is_masked,
            "bos_id": bos_id if train.separate else None,
        }
        static_train = static | {
            "accumulation_steps": train.grad_accumulation,
            "config": train,
            "optimizer": optimizer,
            "select_trainable": select_trainable,
            "has_dropout": model.block.dropout > 0,
        }
        self.abstract_teacher = None
        if teacher is not None:
            self.abstract_teacher = _abstract_parameters(teacher, compute, mesh)
            static_train["teacher_graph"] = parameters.graph(teacher)
        self.init = jax.jit(init, out_shardings=shardings)
        self.train_step = jax.jit(
            functools.partial(train_step, **static_train),
            donate_argnums=0,  # the new state reuses the old one's memory
            out_shardings=(shardings, None),
        )
        self.eval_step = jax.jit(functools.partial(eval_step, **static))

        shape = (train.batch_size, experiment.data.sequence_length + 1)
        self.abstract_rows = jax.ShapeDtypeStruct(
            shape, jnp.int32, sharding=sharding.batch_sharding(mesh)
        )

    def lowered_step(self) -> jax.stages.Lowered:
        """Lowers the training step."""
        teacher = [] if self.abstract_teacher is None else [self.abstract_teacher]
        return self.train_step.lower(self.abstract_state, self.abstract_rows, *teacher)


def _abstract_parameters(model: TransformerConfig, compute: Compute, mesh: jax.sharding.Mesh):
    """Returns a model's parameters as ShapeDtypeStructs, cast and sharded for a forward pass."""
    shapes, axes = parameters.abstract(model)
    return jax.tree.map(
        lambda x, dtype, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s),
        shapes,
        compute_dtypes(shapes, compute.dtype),
        sharding.parameter_shardings(mesh, shapes, axes),
    )


def train_step(
    state: dict,
    rows: jax.Array,
    teacher: dict | None = None,
    *,
    graph,
    optimizer,
    compute: Compute,
    accumulation_steps: int,
    config: TrainConfig | None = None,
    select_trainable: Callable[[dict], dict] = lambda params: params,
    teacher_graph=None,
    masked: bool = False,
    bos_id: int | None = None,
    has_dropout: bool = False,
):
    """Takes one optimizer step.

    Args:
      state: see `Program`; without a config it has no `bad`.
      rows: [B, T + 1] tokens; the gradient is the mean over the batch's B * T targets.
      teacher: parameters of the model to distil (`model.loss.distillation_loss`).
      accumulation_steps: number of microbatches that the batch is split into.
      config: limits for `check_step`; None: steps are not checked.
      select_trainable: parameters -> the subtree that gradients are computed for.
      masked: rows contain a loss mask (`split_loss_mask`); the gradient is then the mean over those
        targets of the batch that count.
      bos_id: the token that begins a document, for a document mask; None: no mask.
      has_dropout: draw a dropout key from the state's key and step.

    Returns:
      The new state, and metrics: loss (nats per token), grad_norm (before clipping), param_norm
      (after the step), and the metrics of `check_step`. The new state is finite if and only if the
      metrics are.
    """
    learned = select_trainable(state["params"])

    scale = {}
    if masked:
        # Each microbatch divides its sum of losses by the mean number of targets per microbatch, so
        # that the average over microbatches is the mean over all targets.
        num_targets = jnp.maximum(jnp.sum(rows[:, 1:] >= 0), 1)
        scale = {"scale": accumulation_steps / num_targets.astype(jnp.result_type(float))}

    dropout = None
    if has_dropout:
        dropout = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])

    def loss(learned, rows, dropout):
        weighted = {}
        if masked:
            rows, loss_mask = split_loss_mask(rows)
            weights = next_tokens(loss_mask, compute)[1].astype(jnp.float32)
            weighted = {"weights_BT": weights} | scale
        tokens, targets, positions = next_tokens(rows, compute)
        model = nnx.merge(graph, merge_trainable(state["params"], learned))
        options = {
            "compute": compute,
            "positions_BT": positions,
            "segment_ids_BS": segment_ids(rows, bos_id),
            "dropout": dropout,
        }
        if teacher is None:
            return mean_loss(model, tokens, targets, **weighted, **options)
        return distillation_loss(
            model,
            tokens,
            targets,
            teacher=nnx.merge(teacher_graph, teacher),
            share=config.teacher_share,
            **options,
        )

    value, grads = _accumulate_gradients(
        jax.value_and_grad(loss), learned, rows, dropout, accumulation_steps
    )
    updates, opt_state = optimizer.update(grads, state["optimizer"], learned)
    new = {
        "params": merge_trainable(state["params"], optax.apply_updates(learned, updates)),
        "optimizer": opt_state,
        "step": state["step"] + 1,
        "key": state["key"],
    }
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
    if config is not None:
        is_bad, new["bad"], verdict = check_step(state["bad"], **metrics, config=config)
        metrics |= verdict
        if config.bad_steps == "skip":
            for name in ("params", "optimizer"):
                new[name] = jax.tree.map(
                    lambda old, new: jnp.where(is_bad, old, new), state[name], new[name]
                )
    return new, metrics | {"param_norm": optax.global_norm(new["params"])}


def _accumulate_gradients(value_and_grad, learned, rows, dropout, accumulation_steps: int):
    """Averages the loss and its gradients over microbatches, computed one after another.

    Args:
      value_and_grad: (learned, rows, dropout key or None) -> (value, gradients).
      rows: [B, T + 1], with B a multiple of `accumulation_steps`.
    """
    if accumulation_steps == 1:
        return value_and_grad(learned, rows, dropout)

    def accumulate(total, rows_and_key):
        return jax.tree.map(jnp.add, total, value_and_grad(learned, *rows_and_key)), None

    # Microbatch i of n consists of rows i, i + n, i + 2 n, ..., so that no row changes its device.
    microbatches = rows.reshape(-1, accumulation_steps, rows.shape[1]).swapaxes(0, 1)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, learned))
    keys = None if dropout is None else jax.random.split(dropout, accumulation_steps)
    total, _ = jax.lax.scan(accumulate, zero, (microbatches, keys))
    return jax.tree.map(lambda x: x / accumulation_steps, total)


def check_step(bad: dict, loss: jax.Array, grad_norm: jax.Array, config: TrainConfig):
    """Decides if a step is bad (see `TrainConfig`), and updates the counters of bad steps.

    Args:
      bad: counters skipped and in_a_row, and mean_loss, which is 0 before the first good step.

    Returns:
      (is_bad, new `bad`, metrics). Metrics are bad (0 or 1) and mean_loss (before this step); with
      bad_steps = "skip" also skipped_steps and bad_steps_in_a_row. With "stop" and without
      spike_factor there are none, since the training loop itself notices non-finite values.
    """
    mean = bad["mean_loss"]
    is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
    if config.spike_factor:
        is_bad |= (mean > 0) & (loss > config.spike_factor * mean)
    loss = loss.astype(mean.dtype)
    new_mean = jnp.where(mean > 0, mean + MEAN_WEIGHT * (loss - mean), loss)
    count = is_bad.astype(jnp.int32)
    new = {
        "skipped": bad["skipped"] + (count if config.bad_steps == "skip" else 0),
        "in_a_row": count * (bad["in_a_row"] + 1),
        "mean_loss": jnp.where(is_bad, mean, new_mean),
    }
    metrics = {}
    if config.spike_factor or config.bad_steps == "skip":
        metrics = {"bad": count, "mean_loss": mean}
    if config.bad_steps == "skip":
        metrics |= {"skipped_steps": new["skipped"], "bad_steps_in_a_row": new["in_a_row"]}
    return is_bad, new, metrics


def eval_step(
    params: dict,
    rows: jax.Array,
    token_bytes: jax.Array,
    *,
    graph,
    compute: Compute,
    masked: bool = False,
    bos_id: int | None = None,
):
    """Returns sums (nats, bytes, targets) over targets that have bytes; special tokens have none.

    With a loss mask: the three sums over targets that count, then over all targets.

    Args:
      token_bytes: bytes of every token, [V]; or [2, V], where the second row has the bytes that a
        token loses if it follows a token without bytes.
    """
    loss_mask = None
    if masked:
        rows, loss_mask = split_loss_mask(rows)
        loss_mask = next_tokens(loss_mask, compute)[1]
    tokens, targets, positions = next_tokens(rows, compute)
    nats = token_losses(
        nnx.merge(graph, params),
        tokens,
        targets,
        compute=compute,
        positions_BT=positions,
        segment_ids_BS=segment_ids(rows, bos_id),
    )
    lost = None
    if token_bytes.ndim == 2:
        token_bytes, lost_V = token_bytes
        lost = lost_V[targets] * (token_bytes[tokens] == 0)
    num_bytes = token_bytes[targets]

    def sums(num_bytes):
        kept = num_bytes if lost is None else num_bytes - lost * (num_bytes > 0)
        return jnp.sum(nats * (num_bytes > 0)), jnp.sum(kept), jnp.sum(num_bytes > 0)

    if loss_mask is None:
        return sums(num_bytes)
    return *sums(num_bytes * loss_mask), *sums(num_bytes)


def split_loss_mask(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits rows into tokens and loss mask (True: counts as a target), both [B, T + 1].

    `kvjax.data.loader` stores a token that does not count as ~token, which is negative.
    """
    loss_mask = rows >= 0
    return jnp.where(loss_mask, rows, ~rows), loss_mask


def segment_ids(rows: jax.Array, bos_id: int | None) -> jax.Array | None:
    """Returns the number of each input token's document, [B, T] int32; None if bos_id is None.

    Tokens before a row's first BOS belong to a document that began in another row; they get 0.

    Args:
      rows: [B, T + 1].
    """
    if bos_id is None:
        return None
    return jnp.cumsum(rows[:, :-1] == bos_id, axis=1, dtype=jnp.int32)


def next_tokens(rows: jax.Array, compute: Compute) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Splits rows [B, T + 1] into tokens [B, T], targets [B, T] and positions [1, T].

    Under context parallelism tokens are in zig-zag order, which gives each device the same amount
    of causal attention.
    """
    T = rows.shape[1] - 1
    if compute.sequence_shards == 1:
        return rows[:, :-1], rows[:, 1:], np.arange(T)[None]
    order_T = zigzag(T, compute.sequence_shards)
    tokens = compute.shard_activations(rows[:, order_T])
    targets = compute.shard_activations(rows[:, order_T + 1])
    return tokens, targets, order_T[None]
