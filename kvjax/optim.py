"""Muon for the matrices of the blocks, AdamW for embedding, head and vectors; or AdamW for all.

Which matrix a weight is follows from its axes (`kvjax.layers.weight`): every block weight that maps
an input to an output is orthogonalised, of every mechanism. What maps nothing is AdamW's: gains,
biases, TPA's fixed factors. Defaults are nanochat's (commit 0f00788).
"""

import dataclasses
import math
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import optax

from kvjax.foundation.configuration import between, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.rounding import round_up
from kvjax.layers.weight import Axes

ORTHOGONALIZE = ("joint", "per_head")
SCHEDULES = ("constant", "cosine", "linear")
MATRICES = ("muon", "adamw")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates are absolute; embedding and head are scaled by (D/768)^-1/2 on top."""

    matrices: str = "muon"  # what the blocks' matrices learn by: "muon" or "adamw"
    matrix_learning_rate: float = 0.02  # learning rate of the blocks' matrices
    embedding_learning_rate: float = 0.2  # learning rate of AdamW, as the next two
    head_learning_rate: float = 0.004  # for the output head
    vector_learning_rate: float = 0.004  # for gains and biases, which the recipe does not have
    lr_scale: float = 1.0  # on all learning rates
    # Whether heads that read the same input form one matrix, or each its own: a key of the recipe,
    # with the same meaning for all mechanisms, because it confounds comparing them.
    orthogonalize: str = "joint"
    momentum_start: float = 0.85  # Muon's momentum at step 0
    momentum_end: float = 0.95  # Muon's momentum after momentum_warmup_steps
    momentum_warmup_steps: int = 300  # steps from start to end; 0: momentum_end at once
    newton_schulz_steps: int = 5  # iterations in each step of Muon
    adam_b1: float = 0.8  # decay of the mean gradient
    adam_b2: float = 0.95  # decay of the mean square
    adam_epsilon: float = 1e-10  # added to the root of the mean square
    matrix_weight_decay: float = 0.0  # weight decay of the blocks' matrices
    adam_weight_decay: float = 0.0  # weight decay of AdamW
    clip_norm: float = 1.0  # limit of the whole gradient's norm; 0: none
    # "constant", then linear over the last part; "cosine"; or "linear", from the first step on.
    schedule: str = "constant"
    warmup_steps: int = 0  # steps from 0 to the full learning rate
    cooldown_fraction: float = 0.2  # share of all steps, with the constant schedule
    final_fraction: float = 0.0  # share of the learning rate that is left at the end
    # Parameters that learn, by what their dotted names hold: ("attention",) or, of some layers,
    # ("segments.0.attention.mechanism.query",); the others stay as they are. (): all learn.
    tuned: tuple[str, ...] = ()

    def __post_init__(self):
        one_of("config.optimizer.orthogonalize", self.orthogonalize, ORTHOGONALIZE)
        one_of("config.optimizer.schedule", self.schedule, SCHEDULES)
        one_of("config.optimizer.matrices", self.matrices, MATRICES)
        at = lambda key: (f"config.optimizer.{key}", getattr(self, key))
        for group in ("matrix", "embedding", "head", "vector"):
            between(*at(f"{group}_learning_rate"), 0.0, 100.0)
        between(*at("lr_scale"), 0.0, 100.0)
        for key in ("matrix_weight_decay", "adam_weight_decay"):
            between(*at(key), 0.0, 100.0)
        for key in ("momentum_start", "momentum_end", "adam_b1", "adam_b2"):
            between(*at(key), 0.0, 0.999999)  # below 1 in float32 too, or the mean never moves
        between(*at("adam_epsilon"), 1e-30, 1.0)  # rows without a gradient divide by it alone
        between(*at("clip_norm"), 1e-6, 1e6, zero="none")
        for key in ("cooldown_fraction", "final_fraction"):
            between(*at(key), 0.0, 1.0)
        for key in ("warmup_steps", "momentum_warmup_steps"):
            between(*at(key), 0, (1 << 31) - 1)  # as steps are counted
        between(*at("newton_schulz_steps"), 0, 100)


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The factor on every learning rate at step 0 .. num_steps - 1."""
    c = config
    body = num_steps - c.warmup_steps
    cooldown = round(c.cooldown_fraction * num_steps) if c.schedule == "constant" else 0
    if body < max(cooldown, 1):
        raise UserError(
            f"config.optimizer.warmup_steps = {c.warmup_steps}: with a cooldown of {cooldown} "
            f"steps at most {num_steps - max(cooldown, 1)} of config.train.num_steps = {num_steps} "
            "are left for it"
        )
    if c.schedule == "cosine":
        main = optax.cosine_decay_schedule(1.0, body, alpha=c.final_fraction)
    elif c.schedule == "linear":
        main = optax.linear_schedule(1.0, c.final_fraction, body)
    elif cooldown:
        main = optax.linear_schedule(1.0, c.final_fraction, cooldown, body - cooldown)
    else:
        main = optax.constant_schedule(1.0)
    warmup = lambda step: (step + 1) / max(c.warmup_steps, 1)
    return optax.join_schedules([warmup, main], [c.warmup_steps])


def momentum_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Muon's momentum at each step."""
    c = config
    if not c.momentum_warmup_steps:  # of which Optax makes a constant at the start value
        return optax.constant_schedule(c.momentum_end)
    return optax.linear_schedule(c.momentum_start, c.momentum_end, c.momentum_warmup_steps)


def make_optimizer(
    config: OptimizerConfig,
    axes: Any,
    *,
    d_model: int,
    num_steps: int,
    muon_dtype: jnp.dtype = jnp.dtype(jnp.float32),
    shardings: Any = None,
) -> optax.GradientTransformation:
    """The recipe's optimizer for a parameter tree whose axes are given.

    Args:
      axes: a tree of axes strings (see `kvjax.layers.weight`) in the shape of the parameters.
      d_model: D, for the (D/768)^-1/2 of embedding and head.
      num_steps: the whole run's, for the schedule.
      muon_dtype: of the Newton-Schulz products.
      shardings: NamedShardings of the parameters, on several devices.
    """
    c = config
    labels = parameter_labels(axes)
    factor = learning_rate_schedule(c, num_steps)
    schedule = factor if c.lr_scale == 1 else lambda step: c.lr_scale * factor(step)
    width = (d_model / 768) ** -0.5
    adam = dict(b1=c.adam_b1, b2=c.adam_b2, eps=c.adam_epsilon, weight_decay=c.adam_weight_decay)
    adamw = lambda rate: optax.adamw(lambda step: rate * schedule(step), **adam)
    matrices = lambda tree, read: jax.tree.map(
        lambda x, label: read(x) if label == "matrix" else optax.MaskedNode(), tree, labels
    )
    muon = optax.chain(
        scale_by_muon(
            matrices(axes, Axes.parse),
            shardings=shardings and matrices(shardings, lambda sharding: sharding),
            momentum=momentum_schedule(c),
            steps=c.newton_schulz_steps,
            per_head=c.orthogonalize == "per_head",
            dtype=muon_dtype,
        ),
        optax.add_decayed_weights(c.matrix_weight_decay)
        if c.matrix_weight_decay
        else optax.identity(),
        optax.scale_by_learning_rate(lambda step: c.matrix_learning_rate * schedule(step)),
    )
    adam_matrices = optax.adamw(
        lambda step: c.matrix_learning_rate * schedule(step),
        **adam | dict(weight_decay=c.matrix_weight_decay),
    )
    groups = {
        "matrix": muon if c.matrices == "muon" else adam_matrices,
        "embedding": adamw(c.embedding_learning_rate * width),
        "head": adamw(c.head_learning_rate * width),
        "vector": adamw(c.vector_learning_rate),
    }
    clip = optax.clip_by_global_norm(c.clip_norm) if c.clip_norm else optax.identity()
    return optax.chain(clip, optax.partition(groups, labels))


def trainable(config: OptimizerConfig, tree: dict) -> dict:
    """The part of a pure dict of parameters, or of what stands for them, that learns.

    Raises:
      UserError: a name in config.optimizer.tuned that none of them has.
    """
    flat = traverse_util.flatten_dict(tree)
    if not config.tuned:
        return tree
    names = {path: ".".join(map(str, path)) for path in flat}
    for wanted in config.tuned:
        if not any(wanted in name for name in names.values()):
            raise UserError(
                f"config.optimizer.tuned: no parameter has {wanted!r} in its name; there are "
                + ", ".join(names.values())
            )
    learns = lambda path: any(wanted in names[path] for wanted in config.tuned)
    return traverse_util.unflatten_dict({path: flat[path] for path in flat if learns(path)})


def merge_trainable(tree: dict, learned: dict) -> dict:
    """The pure dict with the leaves that `tuned` took out of it in new versions."""
    flat = traverse_util.flatten_dict(tree) | traverse_util.flatten_dict(learned)
    return traverse_util.unflatten_dict(flat)


def parameter_labels(axes: Any) -> Any:
    """A tree of "matrix" (Muon), "embedding", "head" and "vector" (AdamW each)."""

    def label(path, text: str) -> str:
        top = path[0].key
        if top in ("embedding", "positions"):
            return "embedding"
        if top == "head":
            return "head"
        return "matrix" if Axes.parse(text).is_matrix else "vector"

    return jax.tree_util.tree_map_with_path(label, axes)


class MuonState(NamedTuple):
    """Steps taken, and the exponential mean of the gradients."""

    count: jax.Array
    momentum: Any


def scale_by_muon(
    axes: Any,
    *,
    shardings: Any = None,
    momentum: optax.Schedule,
    steps: int = 5,
    per_head: bool = False,
    dtype: jnp.dtype = jnp.dtype(jnp.float32),
) -> optax.GradientTransformation:
    """Orthogonalises each matrix's Nesterov momentum, x sqrt(max(1, out/in)).

    Differs from `optax.contrib.scale_by_muon` in a scheduled momentum and in having no bias
    correction (both as in nanochat); tested against it where they agree.

    Args:
      axes: a tree of `Axes` in the shape of the parameters.
      shardings: a tree of NamedShardings like it, on several devices; see `distribute_layers`.
      momentum: momentum at each step.
      per_head: orthogonalise every head's matrix by itself.
      dtype: of the Newton-Schulz products.
    """
    is_axes = lambda x: isinstance(x, Axes)

    def init(params):
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        beta = momentum(state.count)
        lerp = lambda old, new: beta * old + (1 - beta) * new
        mean = jax.tree.map(lerp, state.momentum, grads)
        nesterov = jax.tree.map(lerp, mean, grads)
        where = (
            jax.tree.map(lambda _: None, axes, is_leaf=is_axes) if shardings is None else shardings
        )
        with jax.named_scope("muon"):
            orthogonal = jax.tree.map(one, axes, where, nesterov, is_leaf=is_axes)
        return orthogonal, MuonState(state.count + 1, mean)

    def one(stored: Axes, sharding, gradient):
        meant = stored.per_head() if per_head else stored
        function = lambda w: orthogonalize(w, meant, stored, steps)
        if sharding is not None:
            function = distribute_layers(function, sharding)
        shape = dict(zip(stored.names, gradient.shape[-len(stored.names) :], strict=True))
        fan_in, fan_out = (
            math.prod(shape[n] for n in names) for names in (meant.reduction, meant.output)
        )
        scale = math.sqrt(max(1.0, fan_out / fan_in))
        return scale * function(gradient.astype(dtype)).astype(gradient.dtype)

    return optax.GradientTransformation(init, update)


def orthogonalize(weight: jax.Array, axes: Axes, stored: Axes, steps: int) -> jax.Array:
    """Newton-Schulz on every matrix of a stored weight, in its dtype.

    Args:
      weight: leading unnamed axes (layers), then the axes of `stored`.
      axes: the same letters, arranged as batch, reduction and output of the matrices meant.
    """
    layers = weight.ndim - len(stored.names)
    order = tuple(range(layers)) + tuple(layers + stored.names.index(n) for n in axes.names)
    arranged = weight.transpose(order)
    batch = layers + len(axes.batch)
    fan_in = math.prod(arranged.shape[batch : batch + len(axes.reduction)])
    fan_out = math.prod(arranged.shape[batch + len(axes.reduction) :])
    x_bio = newton_schulz(arranged.reshape(-1, fan_in, fan_out), steps)
    inverse = sorted(range(weight.ndim), key=order.__getitem__)
    return x_bio.reshape(arranged.shape).transpose(inverse)


def distribute_layers(function, sharding: NamedSharding):
    """A function of a stack of layers, applied with whole layers dealt over all devices.

    A sharded matrix multiplied with itself would be gathered at every step of the iteration. Here
    a weight travels twice: one all-to-all (per axis it is split over) brings every device whole
    matrices of some layers, one takes them back. Layers are padded with zeros to a multiple of the
    devices. Over axes that replicate the weight each device takes its layers from its copy, and
    the results are gathered.

    Args:
      function: of [layers, ...], each layer by itself; zeros in, finite out.
      sharding: of its argument and result, the layer axis whole.
    """
    mesh, spec = sharding.mesh, sharding.spec
    split = [(dim, axis) for dim, axis in enumerate(spec) if axis is not None]
    copies = [axis for axis in mesh.axis_names if axis not in [a for _, a in split]]
    split = [(dim, axis) for dim, axis in split if mesh.shape[axis] > 1]
    copies = [axis for axis in copies if mesh.shape[axis] > 1]

    def local(weight):
        L = weight.shape[0]
        padded = round_up(L, mesh.size)
        x = jnp.pad(weight, [(0, padded - L)] + [(0, 0)] * (weight.ndim - 1))
        for axis in copies:
            count = x.shape[0] // mesh.shape[axis]
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * count, count)
        for dim, axis in split:
            x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
        x = function(x)
        for dim, axis in reversed(split):
            x = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
        for axis in reversed(copies):
            x = jax.lax.all_gather(x, axis, tiled=True)
        return x[:L]

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def newton_schulz(x_bio: jax.Array, steps: int) -> jax.Array:
    """Singular values of every [in, out] matrix brought near 1 by a quintic iteration."""
    a, b, c = NEWTON_SCHULZ
    wide = x_bio.shape[1] <= x_bio.shape[2]
    x = x_bio if wide else x_bio.swapaxes(1, 2)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + jnp.asarray(1e-7, x.dtype))

    def iterate(_, x):
        gram = jnp.einsum("bij,bkj->bik", x, x)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, steps, iterate, x)  # compiles in half the time of `steps` copies
    return x if wide else x.swapaxes(1, 2)
