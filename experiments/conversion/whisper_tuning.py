"""Tunes Whisper's decoder after conversion of its attention, against an unconverted control.

As in thin keys' Table 7, only query and key weights are trained (optionally value weights), by
AdamW, in converted models and in the control. All runs train on the same number of tokens; runs of
one seed see the same rows in the same order.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.conversion import curves, records, whisper as whisper_lib
from experiments.conversion.curves import Measured, Methods
from experiments.conversion.whisper import Mechanisms
from experiments.conversion.whisper_converted import Subject
from kvjax import recipes
from kvjax.attention import Attention
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.foundation import progress
from kvjax.layers.weight import axes_of
from kvjax.optim import OptimizerConfig, make_optimizer, merge_trainable, trainable

BATCH = 8  # rows of a step
_SECONDS_PER_RUN = 110.0  # with 49,152 tokens on two CPU cores

CONTROL = "control"
THIN = (192, 128, 96, 64)  # of 384 channels of all heads, keys alone
RESIDUAL_RANKS = (8, 16, 24, 32)  # of LRKV, of 64 channels of a head
# Channels per head with which thin keys cache as many bytes as LRKV, by LRKV's rank. Thin keys
# alone can at most halve the cache: they match ranks 24 and 32 with 5 and 21 channels (21 are
# thin_r128). Thin keys and values can match all ranks, with a latent per head or with one latent
# for all heads.
MATCHED_KEYS = {24: 5}
JOINT = (96, 64)  # keys alone, one latent of all heads


@dataclasses.dataclass(frozen=True)
class Setting:
    """A tuning recipe and its conversions.

    Attributes:
      tune: a key of `recipes.TUNED`.
      teacher_share: weight of KL(original || model) in the loss.
      variants: names, the control first.
    """

    rate: float
    tune: str
    teacher_share: float
    variants: tuple[str, ...]

    @property
    def name(self) -> str:
        learns = f"teacher{self.teacher_share:g}" if self.teacher_share else "text"
        return f"{self.tune}_{learns}_rate{self.rate:g}"


_THIN = tuple(f"thin_r{rank}" for rank in THIN)
_JOINT = tuple(f"thin_joint_r{rank}" for rank in JOINT)
_LRKV = tuple(f"lrkv_r{rank}" for rank in RESIDUAL_RANKS)
_MATCHED = tuple(f"thin_as_lrkv_r{rank}" for rank in MATCHED_KEYS)
for _kind in ("thin_kv", "thin_kv_joint"):
    _MATCHED += tuple(f"{_kind}_as_lrkv_r{rank}" for rank in RESIDUAL_RANKS)
_CONTROLS = tuple(f"thin_{kind}_r{rank}" for kind in ("query", "both") for rank in (192, 96))
_SOME = (CONTROL, "thin_r192", "thin_r96", "lrkv_r8", "lrkv_r24")
# The paper's 5e-5 changes little in so few steps; tables and figures show 5e-4 first.
SETTINGS = (
    Setting(5e-4, "qkv", 0.0, (CONTROL, *_THIN, *_JOINT, *_LRKV, *_MATCHED)),
    Setting(5e-4, "qk", 0.0, (CONTROL, *_THIN, *_LRKV, *_CONTROLS)),
    Setting(5e-5, "qk", 0.0, (CONTROL, *_THIN)),
    Setting(5e-4, "qkv", 0.5, _SOME),
)


def variants(num_heads: int, head_dim: int) -> dict[str, Methods]:
    """Returns the conversions by name for a model of this shape."""

    def rank_per_head(rank):
        return max(1, rank * head_dim // 384)  # 6 heads of 64: rank // 6

    def residual(rank):
        return max(1, rank * head_dim // 64)

    methods: dict[str, Methods] = {CONTROL: ()}
    methods |= {f"thin_r{rank}": (ThinKeys(rank=rank_per_head(rank)),) for rank in THIN}
    methods |= {f"lrkv_r{rank}": (LowRankKV(rank=residual(rank)),) for rank in RESIDUAL_RANKS}
    for kind in ("query", "both"):  # query factors are multiplied, and tuned at full rank
        for rank in (192, 96):
            methods[f"thin_{kind}_r{rank}"] = (ThinKeys(rank=rank_per_head(rank), part=kind),)
    for rank in JOINT:
        joint_rank = max(1, rank * num_heads * head_dim // 384)
        methods[f"thin_joint_r{rank}"] = (ThinKeys(rank=joint_rank, mode="joint"),)
    for rank, channels in MATCHED_KEYS.items():
        methods[f"thin_as_lrkv_r{rank}"] = (ThinKeys(rank=max(1, channels * head_dim // 64)),)
    for rank in RESIDUAL_RANKS:
        same_bytes = residual(rank) + head_dim // num_heads  # K and V: 2·N·r elements
        methods[f"thin_kv_as_lrkv_r{rank}"] = curves.latents_per_head(same_bytes, "outputs")
        joint = head_dim + num_heads * residual(rank)
        methods[f"thin_kv_joint_as_lrkv_r{rank}"] = (curves.joint_latents(joint, "outputs"),)
    return methods


def tasks(
    subject: Subject, *, tokens: int, seeds: int, settings: tuple[Setting, ...] = SETTINGS
) -> list[records.Task]:
    """Returns a task per run; the runs of a seed follow each other."""
    c = subject.whisper.config
    methods = variants(c.num_heads, c.d_model // c.num_heads)
    steps = tokens // (BATCH * subject.sizes.row_length)
    common = dataclasses.asdict(subject.sizes) | dict(steps=steps, batch=BATCH)
    seconds = _SECONDS_PER_RUN * steps * BATCH * subject.sizes.row_length / 49_152
    all_tasks = []
    for setting in settings:
        for seed in range(seeds):
            for variant in setting.variants:
                keys = dict(seed=seed, variant=variant, tune=setting.tune, rate=setting.rate)
                keys |= dict(teacher_share=setting.teacher_share)
                run = functools.partial(_run, subject, methods[variant], setting, steps, seed)
                name = f"whisper/after/{setting.name}/{variant}_seed{seed}"
                all_tasks.append(records.Task(name, common | keys, run, seconds))
    return all_tasks


def _run(subject: Subject, methods: Methods, setting: Setting, steps: int, seed: int) -> dict:
    """Converts, tunes and measures."""
    params, mechanisms, errors = subject.converted(methods)
    before = Measured(mechanisms, errors, subject.perplexity(params, mechanisms))
    order = np.random.default_rng(seed).permutation(len(subject.training_RT))
    rows_SBT = subject.training_RT[order[: steps * BATCH]].reshape(steps, BATCH, -1)
    teacher = (subject.whisper.params, subject.mechanisms) if setting.teacher_share else None
    with progress.waiting("tuning") as doing:
        params, losses, learned = tune(
            params,
            mechanisms,
            rows_SBT,
            optimizer(setting),
            first=len(subject.whisper.prefix),
            teacher=teacher,
            share=setting.teacher_share,
            at=doing.at,
        )
    methods_json = [dict(method=type(m).__name__) | dataclasses.asdict(m) for m in methods]
    result = dict(methods=methods_json, learned=learned, losses=losses)
    result |= dict(before=before.perplexity, after=subject.perplexity(params, mechanisms))
    point = curves.point(before, subject.mechanisms)
    return result | {key: point[key] for key in ("cached", "share", "lost")}


def optimizer(setting: Setting) -> OptimizerConfig:
    """Returns `recipes.tuning` at the setting's learning rate."""
    rates = {f"{group}_learning_rate" for group in ("matrix", "embedding", "head", "vector")}
    keys = recipes.tuning() | dict.fromkeys(rates, setting.rate)
    return OptimizerConfig(**keys | dict(tuned=recipes.TUNED[setting.tune]))


def tune(
    params: dict,
    mechanisms: Mechanisms,
    rows_SBT: np.ndarray,
    config: OptimizerConfig,
    *,
    first: int,
    teacher: tuple[dict, Mechanisms] | None = None,
    share: float = 0.0,
    at: Callable[[str], None] = lambda text: None,
) -> tuple[dict, list[float], int]:
    """Takes a step on each batch; returns params, the losses, and the number of trained parameters.

    Args:
      config: its `tuned` names parameters of self-attention.
      first: index of the first target.
      teacher: params and mechanisms of the distillation teacher.
      share: weight of KL(teacher || model) in the loss.
      at: progress callback.
    """
    taught, taught_mechanisms = teacher or (None, None)
    D, S = params["embedding"].shape[1], len(rows_SBT)
    transform, step = _program(mechanisms, config, S, D, first, taught_mechanisms, share)
    learned = jax.tree.map(jnp.copy, trainable(config, _attention(params)))  # `step` donates it
    state, losses = transform.init(learned), []
    for i, rows_BT in enumerate(rows_SBT):
        at(f"step {i} of {S}")
        learned, state, value = step(learned, state, params, taught, rows_BT)
        losses.append(float(value))
    count = sum(x.size for x in jax.tree.leaves(learned))
    return _with_learned(params, learned), losses, count


@functools.lru_cache(maxsize=32)  # seeds of a variant share the compiled step
def _program(
    mechanisms: Mechanisms,
    config: OptimizerConfig,
    num_steps: int,
    d_model: int,
    first: int,
    taught_mechanisms: Mechanisms | None,
    share: float,
) -> tuple[optax.GradientTransformation, Callable]:
    """Returns the optimizer and a jitted step.

    The step maps (trained params, optimizer state, params, teacher's params, rows) to the new
    trained params and state, and the loss.
    """
    axes = {str(i): dict(attention=_axes(m, d_model)) for i, m in enumerate(mechanisms)}
    sizes = dict(d_model=d_model, num_steps=num_steps)
    transform = make_optimizer(config, trainable(config, axes), **sizes)

    def loss(learned, params, taught, rows_BT):
        inputs_BT, targets_BT = rows_BT[:, :-1], rows_BT[:, first:]

        def hidden(p, m):
            return whisper_lib.forward(p, m, inputs_BT)[:, first - 1 :]

        x_BTD = hidden(_with_learned(params, learned), mechanisms)
        # Without a teacher, share is 0 and y_BTD is unused.
        y_BTD = x_BTD if taught is None else hidden(taught, taught_mechanisms)
        nats = functools.partial(_nats, params["embedding"], share=share)
        return jnp.mean(jax.lax.map(nats, (x_BTD, jax.lax.stop_gradient(y_BTD), targets_BT)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(learned, state, params, taught, rows_BT):
        value, grads = jax.value_and_grad(loss)(learned, params, taught, rows_BT)
        updates, state = transform.update(grads, state, learned)
        return optax.apply_updates(learned, updates), state, value

    return transform, step


def _attention(params: dict) -> dict:
    """Returns self-attention weights by layer, a pure dict."""
    return {str(i): dict(attention=b["attention"]) for i, b in enumerate(params["layers"])}


def _with_learned(params: dict, learned: dict) -> dict:
    """Returns params with the trained weights replaced."""
    whole = merge_trainable(_attention(params), learned)
    return params | dict(layers=[b | whole[str(i)] for i, b in enumerate(params["layers"])])


def _nats(embedding_VD: jax.Array, row: tuple, *, share: float) -> jax.Array:
    """Returns (1 - share)·cross-entropy + share·KL(teacher || model) of one row, [T]."""
    x_TD, y_TD, targets_T = row
    log_p_TV = jax.nn.log_softmax(whisper_lib.logits(dict(embedding=embedding_VD), x_TD))
    nats_T = -jnp.take_along_axis(log_p_TV, targets_T[:, None], axis=-1)[:, 0]
    if not share:
        return nats_T
    log_q_TV = jax.nn.log_softmax(whisper_lib.logits(dict(embedding=embedding_VD), y_TD))
    divergence_T = jnp.sum(jnp.exp(log_q_TV) * (log_q_TV - log_p_TV), axis=-1)
    return (1 - share) * nats_T + share * divergence_T


def _axes(mechanism, d_model: int) -> dict:
    """Returns the axes of an `Attention`'s weights."""
    module = nnx.eval_shape(lambda: Attention(mechanism, d_model, rngs=nnx.Rngs(0)))
    return axes_of(nnx.state(module))
