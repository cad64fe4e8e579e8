"""Whisper's decoder tuned after its attention was converted, against the same without conversion.

Thin keys' Table 7: only what makes queries and keys learns (or values too), by AdamW; the control
is tuned alike. Every run sees as many tokens, and a seed has the same rows in the same order for
all of them.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.conversion import curves, kept, whisper as whisper_lib
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
_SECONDS = 110.0  # of a run of 49,152 tokens on two CPU cores

CONTROL = "control"
THIN = (192, 128, 96, 64)  # of 384 channels of all heads, keys alone
RESIDUAL_RANKS = (8, 16, 24, 32)  # of LRKV, of 64 channels of a head
# Thin keys in as many bytes as LRKV of those ranks. Keys alone halve the cache at most: they reach
# ranks 24 and 32, by 5 and 21 channels of a head. Keys and values reach all, with a latent for each
# head or one of all heads, which shares over heads as LRKV does.
MATCHED_KEYS = {24: 5}
JOINT = (96, 64)  # keys alone, one latent of all heads


@dataclasses.dataclass(frozen=True)
class Setting:
    """How runs learn, and which.

    Attributes:
      tune: a key of `recipes.TUNED`.
      teacher_share: of the loss that is KL(original || model).
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
# At the paper's 5e-5 so few steps change little: 5e-4 is what tables and figures show first.
SETTINGS = (
    Setting(5e-4, "qkv", 0.0, (CONTROL, *_THIN, *_JOINT, *_LRKV, *_MATCHED)),
    Setting(5e-4, "qk", 0.0, (CONTROL, *_THIN, *_LRKV, *_CONTROLS)),
    Setting(5e-5, "qk", 0.0, (CONTROL, *_THIN)),
    Setting(5e-4, "qkv", 0.5, _SOME),
)


def variants(num_heads: int, head_dim: int) -> dict[str, Methods]:
    """The conversions by name, of a model of that shape."""
    of_head = lambda rank: max(1, rank * head_dim // 384)  # 6 heads of 64: rank // 6
    residual = lambda rank: max(1, rank * head_dim // 64)
    same_bytes = lambda rank: residual(rank) + head_dim // num_heads  # K and V: 2·N·r elements
    found: dict[str, Methods] = {CONTROL: ()}
    found |= {f"thin_r{rank}": (ThinKeys(rank=of_head(rank)),) for rank in THIN}
    found |= {f"lrkv_r{rank}": (LowRankKV(rank=residual(rank)),) for rank in RESIDUAL_RANKS}
    for kind in ("query", "both"):  # queries are multiplied out, and tuned whole
        for rank in (192, 96):
            found[f"thin_{kind}_r{rank}"] = (ThinKeys(rank=of_head(rank), part=kind),)
    for rank in JOINT:
        of_all = max(1, rank * num_heads * head_dim // 384)
        found[f"thin_joint_r{rank}"] = (ThinKeys(rank=of_all, mode="joint"),)
    for rank, of_key in MATCHED_KEYS.items():
        found[f"thin_as_lrkv_r{rank}"] = (ThinKeys(rank=max(1, of_key * head_dim // 64)),)
    for rank in RESIDUAL_RANKS:
        both = curves.keys_and_values(same_bytes(rank), "outputs")
        found[f"thin_kv_as_lrkv_r{rank}"] = both
        joint = head_dim + num_heads * residual(rank)
        found[f"thin_kv_joint_as_lrkv_r{rank}"] = (curves.joint_key_and_value(joint, "outputs"),)
    return found


def tasks(
    subject: Subject, *, tokens: int, seeds: int, settings: tuple[Setting, ...] = SETTINGS
) -> list[kept.Task]:
    """A file for each run; those of a seed stand together."""
    c = subject.whisper.config
    made = variants(c.num_heads, c.d_model // c.num_heads)
    steps = tokens // (BATCH * subject.sizes.row_length)
    common = dataclasses.asdict(subject.sizes) | dict(steps=steps, batch=BATCH)
    seconds = _SECONDS * steps * BATCH * subject.sizes.row_length / 49_152
    found = []
    for setting in settings:
        for seed in range(seeds):
            for variant in setting.variants:
                keys = dict(seed=seed, variant=variant, tune=setting.tune, rate=setting.rate)
                keys |= dict(teacher_share=setting.teacher_share)
                run = functools.partial(_run, subject, made[variant], setting, steps, seed)
                name = f"whisper/after/{setting.name}/{variant}_seed{seed}"
                found.append(kept.Task(name, common | keys, run, seconds))
    return found


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
    of_methods = [dict(method=type(m).__name__) | dataclasses.asdict(m) for m in methods]
    result = dict(methods=of_methods, learned=learned, losses=losses)
    result |= dict(before=before.perplexity, after=subject.perplexity(params, mechanisms))
    point = curves.point(before, subject.mechanisms)
    return result | {key: point[key] for key in ("cached", "share", "lost")}


def optimizer(setting: Setting) -> OptimizerConfig:
    """`recipes.tuning` at the setting's rate."""
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
    """Params after a step on each batch, the loss of each, and how many numbers learned.

    Args:
      config: its `tuned` names parameters of self-attention.
      first: index of the first token whose prediction counts.
      teacher: params and mechanisms of the model whose predictions are learned.
      share: of the loss that is KL(teacher || model).
      at: told how far it is.
    """
    taught, taught_mechanisms = teacher or (None, None)
    D, S = params["embedding"].shape[1], len(rows_SBT)
    transform, step = _program(mechanisms, config, S, D, first, taught_mechanisms, share)
    learned = jax.tree.map(jnp.copy, trainable(config, _attention(params)))  # is given away
    state, losses = transform.init(learned), []
    for i, rows_BT in enumerate(rows_SBT):
        at(f"step {i} of {S}")
        learned, state, value = step(learned, state, params, taught, rows_BT)
        losses.append(float(value))
    count = sum(x.size for x in jax.tree.leaves(learned))
    return _with_learned(params, learned), losses, count


@functools.lru_cache(maxsize=32)  # a variant's seeds share it
def _program(
    mechanisms: Mechanisms,
    config: OptimizerConfig,
    num_steps: int,
    d_model: int,
    first: int,
    taught_mechanisms: Mechanisms | None,
    share: float,
) -> tuple[optax.GradientTransformation, Callable]:
    """The optimizer, and a step: (learned, its state, params, teacher's, rows) to the first two
    and the loss."""
    axes = {str(i): dict(attention=_axes(m, d_model)) for i, m in enumerate(mechanisms)}
    sizes = dict(d_model=d_model, num_steps=num_steps)
    transform = make_optimizer(config, trainable(config, axes), **sizes)

    def loss(learned, params, taught, rows_BT):
        inputs_BT, targets_BT = rows_BT[:, :-1], rows_BT[:, first:]
        of = lambda p, m: whisper_lib.forward(p, m, inputs_BT)[:, first - 1 :]
        x_BTD = of(_with_learned(params, learned), mechanisms)
        # What has no teacher is its own, which is not used.
        y_BTD = x_BTD if taught is None else of(taught, taught_mechanisms)
        nats = functools.partial(_nats, params["embedding"], share=share)
        return jnp.mean(jax.lax.map(nats, (x_BTD, jax.lax.stop_gradient(y_BTD), targets_BT)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(learned, state, params, taught, rows_BT):
        value, grads = jax.value_and_grad(loss)(learned, params, taught, rows_BT)
        updates, state = transform.update(grads, state, learned)
        return optax.apply_updates(learned, updates), state, value

    return transform, step


def _attention(params: dict) -> dict:
    """Self-attention's weights by layer, a pure dict."""
    return {str(i): dict(attention=b["attention"]) for i, b in enumerate(params["layers"])}


def _with_learned(params: dict, learned: dict) -> dict:
    """Params with what was learned of `_attention`."""
    whole = merge_trainable(_attention(params), learned)
    return params | dict(layers=[b | whole[str(i)] for i, b in enumerate(params["layers"])])


def _nats(embedding_VD: jax.Array, row: tuple, *, share: float) -> jax.Array:
    """[T]: (1 - share)·cross-entropy + share·KL(teacher || model) of one row."""
    x_TD, y_TD, targets_T = row
    log_p_TV = jax.nn.log_softmax(whisper_lib.logits(dict(embedding=embedding_VD), x_TD))
    nats_T = -jnp.take_along_axis(log_p_TV, targets_T[:, None], axis=-1)[:, 0]
    if not share:
        return nats_T
    log_q_TV = jax.nn.log_softmax(whisper_lib.logits(dict(embedding=embedding_VD), y_TD))
    divergence_T = jnp.sum(jnp.exp(log_q_TV) * (log_q_TV - log_p_TV), axis=-1)
    return (1 - share) * nats_T + share * divergence_T


def _axes(mechanism, d_model: int) -> dict:
    """The axes of an `Attention`'s weights."""
    module = nnx.eval_shape(lambda: Attention(mechanism, d_model, rngs=nnx.Rngs(0)))
    return axes_of(nnx.state(module))
