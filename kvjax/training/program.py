"""The jitted programs of an experiment: initial state, training step and evaluation step."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.distributed import sharding
from kvjax.experiment import Experiment, TrainConfig
from kvjax.kernels.softmax_attention.api import zigzag
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.loss import distillation_loss, mean_loss, token_losses
from kvjax.model.transformer import Compute, Transformer, compute_dtypes
from kvjax.optim import make_optimizer, merge_trainable, trainable

MEAN_WEIGHT = 0.02  # of a step in the mean of recent losses: about 50 of them count


class Program:
    """The jitted functions of an experiment on a mesh; a state is a plain tree of arrays.

    State: {"params", "optimizer", "step": int32, "key": the seed's key data, "bad": what decides
    on bad steps and counts them, see `TrainConfig`}.

    Attributes:
      graph: what `nnx.merge` needs beside params.
      abstract_state: ShapeDtypeStructs with shardings.
      abstract_rows: one, of a step's batch.
      init: key -> state.
      abstract_teacher: the teacher's parameters in the dtype it computes in, or None.
      train_step: (state, rows [B, T + 1]) -> (state, metrics); the state passed in is consumed.
        With a teacher its parameters are a third argument.
      eval_step: (params, rows, token_bytes [V]) -> sums, see `eval_step`.

    Rows of an experiment with a mask have ~token for a token that is not trained on, see `marked`.
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
          teacher: of a model whose predictions are learned, of the same vocabulary.
          bos_id: of the token that begins a document, for `config.train.separate`.
        """
        model = experiment.model
        if mesh.size > 1:
            compute = dataclasses.replace(compute, mesh=mesh)
        shapes, axes = parameters.abstract(model)
        select_trainable = functools.partial(trainable, experiment.optimizer)
        split = mesh.size > 1
        optimizer = make_optimizer(
            experiment.optimizer,
            select_trainable(axes),
            d_model=model.block.d_model,
            num_steps=experiment.train.num_steps,
            muon_dtype=compute.dtype,
            shardings=select_trainable(sharding.parameter_shardings(mesh, shapes, axes))
            if split
            else None,
        )

        def init(key: jax.Array) -> dict[str, Any]:
            params = nnx.to_pure_dict(nnx.state(Transformer(model, key)))
            return dict(
                params=params,
                optimizer=optimizer.init(select_trainable(params)),
                step=jnp.zeros((), jnp.int32),
                key=jax.random.key_data(key),
                bad=dict(
                    skipped=jnp.zeros((), jnp.int32),
                    in_a_row=jnp.zeros((), jnp.int32),
                    mean_loss=jnp.zeros((), jnp.float32),
                ),
            )

        abstract = jax.eval_shape(init, jax.random.key(0))
        shardings = sharding.state_shardings(mesh, shapes, axes, abstract)
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )
        rows = (experiment.train.batch_size, experiment.data.sequence_length + 1)
        split = sharding.batch_sharding(mesh)
        self.abstract_rows = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=split)
        self.graph = parameters.graph(model)
        self.abstract_teacher, of_teacher = None, {}
        if teacher is not None:
            whole = parameters.abstract(teacher)
            places = sharding.parameter_shardings(mesh, *whole)
            dtypes = compute_dtypes(whole.shapes, compute.dtype)
            place = lambda x, dtype, at: jax.ShapeDtypeStruct(x.shape, dtype, sharding=at)
            self.abstract_teacher = jax.tree.map(place, whole.shapes, dtypes, places)
            of_teacher = dict(teacher_graph=parameters.graph(teacher))
        self.init = jax.jit(init, out_shardings=shardings)
        static = dict(graph=self.graph, compute=compute, masked=experiment.is_masked)
        static |= dict(bos_id=bos_id if experiment.train.separate else None)
        steps = dict(accumulation_steps=experiment.train.grad_accumulation, config=experiment.train)
        steps |= dict(optimizer=optimizer, select_trainable=select_trainable, **of_teacher)
        steps |= dict(has_dropout=model.block.dropout > 0)
        self.train_step = jax.jit(
            functools.partial(train_step, **steps, **static),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        self.eval_step = jax.jit(functools.partial(eval_step, **static))
        # An evaluation's batch: as many rows as the model holds at once in a training step.
        part = (rows[0] // experiment.train.grad_accumulation, rows[1])
        self._abstract_part = jax.ShapeDtypeStruct(part, jnp.int32, sharding=split)
        self._token_bytes = jax.ShapeDtypeStruct((model.vocab_size,), jnp.int32)

    def lowered_step(self) -> jax.stages.Lowered:
        """The training step, lowered."""
        teacher = [] if self.abstract_teacher is None else [self.abstract_teacher]
        return self.train_step.lower(self.abstract_state, self.abstract_rows, *teacher)

    def lowered_steps(self) -> dict[str, jax.stages.Lowered]:
        """What several processes run together, lowered: "training step" and "evaluation step"."""
        params = self.abstract_state["params"]
        train = self.lowered_step()
        evaluate = self.eval_step.lower(params, self._abstract_part, self._token_bytes)
        return {"training step": train, "evaluation step": evaluate}


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
    """One optimizer step.

    Args:
      state: params, optimizer, step, key, and with a policy bad.
      rows: [B, T + 1] tokens; the gradient is the mean over all B·T targets, taken in `parts`.
      teacher: params of a model whose predictions are learned, as `policy.teacher_share` says.
      learning: the part of params that learns, for which gradients are computed.
      masked: rows are as `marked` reads them; the gradient is the mean over the targets that count
        in all of the batch, whichever part or device they are in.
      begins: the token that begins a document; attention does not leave one. None: it does.
      policy: what to do on a bad step; None: nothing.
      drops: whether the model has dropout; what is dropped follows from the state's key and step.

    Returns:
      The new state, and {"loss": nats per token, "grad_norm": before clipping, "param_norm": after
      the step}: a state is finite where these are; with a policy also those of `judge`.
    """

    learned = select_trainable(state["params"])

    whole = {}
    if masked:  # as much for each part as without a mask: their mean is that of the step
        counts = jnp.maximum(jnp.sum(rows[:, 1:] >= 0), 1)
        whole = dict(scale=accumulation_steps / counts.astype(jnp.result_type(float)))

    dropout = None
    if has_dropout:
        dropout = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])

    def loss(learned, rows, dropout):
        weighted = {}
        if masked:
            rows, counts = split_loss_mask(rows)
            weights = next_tokens(counts, compute)[1].astype(jnp.float32)
            weighted = dict(weights_BT=weights) | whole
        tokens, targets, positions = next_tokens(rows, compute)
        model = nnx.merge(graph, merge_trainable(state["params"], learned))
        options = dict(compute=compute, positions_BT=positions)
        options |= dict(segment_ids_BS=segment_ids(rows, bos_id), dropout=dropout)
        if teacher is None:
            return mean_loss(model, tokens, targets, **weighted, **options)
        taught = dict(teacher=nnx.merge(teacher_graph, teacher), share=config.teacher_share)
        return distillation_loss(model, tokens, targets, **taught, **options)

    value, grads = _accumulate_gradients(
        jax.value_and_grad(loss), learned, rows, dropout, accumulation_steps
    )
    updates, opt_state = optimizer.update(grads, state["optimizer"], learned)
    params = merge_trainable(state["params"], optax.apply_updates(learned, updates))
    new = dict(
        params=params,
        optimizer=opt_state,
        step=state["step"] + 1,
        key=state["key"],
    )
    metrics = dict(loss=value, grad_norm=optax.global_norm(grads))
    if config is not None:
        is_bad, new["bad"], verdict = check_step(state["bad"], **metrics, config=config)
        metrics |= verdict
        if config.bad_steps == "skip":
            stay = lambda old, new: jnp.where(is_bad, old, new)
            for part in ("params", "optimizer"):
                new[part] = jax.tree.map(stay, state[part], new[part])
    return new, metrics | dict(param_norm=optax.global_norm(new["params"]))


def _accumulate_gradients(value_and_grad, learned, rows, dropout, accumulation_steps: int):
    """The loss and its gradients, one part of the rows after another: gradient accumulation.

    Args:
      value_and_grad: (learned, rows, dropout's key or None) -> (value, gradients).
      rows: [B, T + 1]; `parts` divides B.
    """
    if accumulation_steps == 1:
        return value_and_grad(learned, rows, dropout)

    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, value_and_grad(learned, *part)), None

    # Part i takes rows i, i + parts, ...: each device keeps the rows it has.
    by_part = rows.reshape(-1, accumulation_steps, rows.shape[1]).swapaxes(0, 1)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, learned))
    keys = None if dropout is None else jax.random.split(dropout, accumulation_steps)
    total, _ = jax.lax.scan(accumulate, zero, (by_part, keys))
    return jax.tree.map(lambda x: x / accumulation_steps, total)


def check_step(bad: dict, loss: jax.Array, grad_norm: jax.Array, config: TrainConfig):
    """Whether a step is bad (see `TrainConfig`), the new state of that question, and what to log.

    Args:
      bad: skipped, in_a_row, and mean_loss, 0 before the first good step.

    Returns:
      A boolean; a new `bad`; {} if by the policy no step is bad but those with figures that are not
      finite, and these end the run; else {"bad": 0 or 1, "mean_loss": before this step} and with
      bad_steps = "skip" also skipped_steps and bad_steps_in_a_row.
    """
    mean = bad["mean_loss"]
    is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
    if config.spike_factor:
        is_bad |= (mean > 0) & (loss > config.spike_factor * mean)
    loss = loss.astype(mean.dtype)
    moved = jnp.where(mean > 0, mean + MEAN_WEIGHT * (loss - mean), loss)
    counted = is_bad.astype(jnp.int32)
    new = dict(
        skipped=bad["skipped"] + (counted if config.bad_steps == "skip" else 0),
        in_a_row=counted * (bad["in_a_row"] + 1),
        mean_loss=jnp.where(is_bad, mean, moved),
    )
    verdict = {}
    if config.spike_factor or config.bad_steps == "skip":
        verdict = dict(bad=counted, mean_loss=mean)
    if config.bad_steps == "skip":
        verdict |= dict(skipped_steps=new["skipped"], bad_steps_in_a_row=new["in_a_row"])
    return is_bad, new, verdict


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
    """Sums over the targets that have bytes (specials have none): (nats, bytes, targets).

    With a mask over those that count, and behind these three the same over all.
    """
    counts = None
    if masked:
        rows, counts = split_loss_mask(rows)
        counts = next_tokens(counts, compute)[1]
    tokens, targets, positions = next_tokens(rows, compute)
    options = dict(
        compute=compute, positions_BT=positions, segment_ids_BS=segment_ids(rows, bos_id)
    )
    nats = token_losses(nnx.merge(graph, params), tokens, targets, **options)
    num_bytes = token_bytes[targets]

    def sums(num_bytes):
        return jnp.sum(nats * (num_bytes > 0)), jnp.sum(num_bytes), jnp.sum(num_bytes > 0)

    if counts is None:
        return sums(num_bytes)
    return *sums(num_bytes * counts), *sums(num_bytes)


def split_loss_mask(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, T + 1] of rows with a mask, and whether each counts as a target.

    `kvjax.data.loader` gives one that does not with its bits inverted: ~token, which is negative.
    """
    counts = rows >= 0
    return jnp.where(counts, rows, ~rows), counts


def segment_ids(rows: jax.Array, bos_id: int | None) -> jax.Array | None:
    """[B, T] int32 which document of its row each input is of, from rows [B, T + 1], in order."""
    if bos_id is None:
        return None
    return jnp.cumsum(rows[:, :-1] == bos_id, axis=1, dtype=jnp.int32)


def next_tokens(rows: jax.Array, compute: Compute) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Tokens [B, T], what follows each, and their positions [1, T], from rows [B, T + 1].

    Where a row is split over devices its tokens are dealt in zig-zag, so that each device has as
    much causal attention to do as any other.
    """
    T = rows.shape[1] - 1
    if compute.sequence_shards == 1:
        return rows[:, :-1], rows[:, 1:], np.arange(T)[None]
    order_T = zigzag(T, compute.sequence_shards)
    tokens, targets = (
        compute.shard_activations(rows[:, order_T]),
        compute.shard_activations(rows[:, order_T + 1]),
    )
    return tokens, targets, order_T[None]
