"""Converts the self-attention of Whisper's decoder, and measures its perplexity by rank."""

from collections.abc import Sequence
import dataclasses
import functools

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from experiments.conversion import curves, records, texts, whisper as whisper_lib
from experiments.conversion.curves import Curve, Measured, Methods
from experiments.conversion.whisper import Mechanisms, Whisper
from kvjax.convert import layer as layer_lib
from kvjax.foundation import progress

RANKS = (64, 96, 128, 192, 256, 320)  # of all heads together, which have 384 channels
RESIDUAL_RANKS = (0, 4, 8, 12, 16, 24, 32, 48)  # per head of 64 channels
_BATCH = 8
_SECONDS_PER_POINT = 6.0  # with 64 rows of 128 tokens, on two CPU cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of rows, and their length."""

    row_length: int = 128  # tokens of text, after the ids of `whisper.PREFIX`
    validation_rows: int = 64  # spread over the held-out text
    calibration_rows: int = 256  # spread over the training text


class Subject:
    """The model and its texts, read on first use."""

    def __init__(self, folder: epath.PathLike, sizes: Sizes):
        self.folder, self.sizes = folder, sizes

    @functools.cached_property
    def whisper(self) -> Whisper:
        return whisper_lib.load(self.folder)

    @property
    def mechanisms(self) -> Mechanisms:
        return self.whisper.config.mechanisms

    @functools.cached_property
    def validation_RT(self) -> np.ndarray:
        return spread(self._rows(texts.validation_text()), self.sizes.validation_rows)

    @functools.cached_property
    def training_RT(self) -> np.ndarray:
        return self._rows(texts.training_text())

    @functools.cached_property
    def moments(self) -> list[np.ndarray]:
        """Second moments of each layer's self-attention inputs on training text, see `moments`."""
        rows_RT = spread(self.training_RT, self.sizes.calibration_rows)
        with progress.waiting("calibrating"):
            return moments(self.whisper.params, self.mechanisms, rows_RT[:, :-1])

    def converted(self, methods: Methods) -> tuple[dict, Mechanisms, list[dict[str, float]]]:
        """Returns params and mechanisms after conversion, and each layer's errors."""
        calibrated = any(method.objective != "weights" for method in methods)
        moments_by_layer = self.moments if calibrated else [None] * len(self.mechanisms)
        return convert(self.whisper.params, self.mechanisms, methods, moments_by_layer)

    def perplexity(self, params: dict, mechanisms: Mechanisms) -> float:
        return whisper_lib.perplexity(params, mechanisms, self.validation_RT, batch=_BATCH)

    def measure(self, methods: Methods) -> Measured:
        """Converts by each method in turn; returns mechanisms, errors and held-out perplexity."""
        params, mechanisms, errors = self.converted(methods)
        return Measured(mechanisms, errors, self.perplexity(params, mechanisms))

    def _rows(self, documents: list[str]) -> np.ndarray:
        whisper = self.whisper
        length = self.sizes.row_length
        return texts.rows(whisper.encode, documents, length=length, prefix=whisper.prefix)


def spread(rows_RT: np.ndarray, count: int) -> np.ndarray:
    """Returns at most `count` of the rows, evenly spaced."""
    count = min(count, len(rows_RT))
    return rows_RT[np.arange(count) * len(rows_RT) // count]


def moments(params: dict, mechanisms: Mechanisms, rows_RT: np.ndarray) -> list[np.ndarray]:
    """Returns each layer's mean of x x^T over tokens, float64 [E, E] with E = D + 1.

    x is an input of self-attention, with a 1 appended for the biases. LayerNorm's outputs lie in a
    hyperplane: the moments are singular, and rounding to float32 would make them indefinite.
    """
    inputs = jax.jit(lambda params, rows: whisper_lib.attention_inputs(params, mechanisms, rows))
    total = [0.0] * len(mechanisms)
    for start in range(0, len(rows_RT), _BATCH):
        for i, x_BTD in enumerate(inputs(params, rows_RT[start : start + _BATCH])):
            x_TD = np.asarray(x_BTD, np.float64).reshape(-1, x_BTD.shape[-1])
            x_TE = np.concatenate([x_TD, np.ones_like(x_TD[:, :1])], axis=1)
            total[i] = total[i] + x_TE.T @ x_TE
    return [sum_EE / rows_RT.size for sum_EE in total]


def convert(
    params: dict,
    mechanisms: Mechanisms,
    methods: Methods,
    moments: Sequence[np.ndarray | None],
) -> tuple[dict, Mechanisms, list[dict[str, float]]]:
    """Converts every layer's self-attention by each method in turn.

    Args:
      moments: see `moments`, by layer; None if all objectives are "weights".

    Returns:
      The new params, and mechanisms and errors by layer.
    """
    new_layers, new_mechanisms, errors = [], [], []
    for block, mechanism, moment_EE in zip(params["layers"], mechanisms, moments, strict=True):
        weights, layer_errors = block["attention"], {}
        for method in methods:
            layer = layer_lib.read(weights, mechanism, rope=None)
            calibrated = method.objective != "weights"
            converted = method.convert(layer, moment_EE if calibrated else layer.identity_moment())
            mechanism = method.mechanism(mechanism, rope=None)
            weights, layer_errors = converted.weights, layer_errors | converted.errors
        attention = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights)
        new_layers.append(block | dict(attention=attention))
        new_mechanisms.append(mechanism)
        errors.append(layer_errors)
    return params | dict(layers=new_layers), tuple(new_mechanisms), errors


# -- before tuning ---------------------------------------------------------------------------------


def all_curves(num_heads: int, head_dim: int) -> list[Curve]:
    """Returns the curves to measure for a model of this shape."""
    ranks = [rank for rank in RANKS if rank < num_heads * head_dim]
    residual = [rank for rank in RESIDUAL_RANKS if rank < head_dim]
    chosen_curves = [
        curves.thin_keys(ranks, part, mode, objective, heads=num_heads)
        for part, objectives in curves.OBJECTIVES.items()
        for mode in ("joint", "per_head")
        for objective in objectives
    ]
    for objective in curves.LRKV_OBJECTIVES:
        chosen_curves.append(curves.thin_keys_and_values(ranks, objective, heads=num_heads))
        chosen_curves.append(curves.joint_keys_and_values(ranks, objective))
        chosen_curves.append(curves.lrkv(residual, objective))
    middle = residual[len(residual) // 2]
    return [*chosen_curves, curves.lrkv([middle], "outputs", align=False)]


def tasks(subject: Subject) -> list[records.Task]:
    """Returns the tasks that measure perplexity by rank."""
    c = subject.whisper.config
    shape = dict(num_heads=c.num_heads, head_dim=c.d_model // c.num_heads)
    return curves.tasks(
        "whisper",
        all_curves(**shape),
        subject.mechanisms,
        subject.measure,
        shape=shape,
        settings=dataclasses.asdict(subject.sizes),
        seconds=_SECONDS_PER_POINT * subject.sizes.validation_rows / 64,
    )
