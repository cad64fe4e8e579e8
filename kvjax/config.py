"""Resolves a config into frozen dataclasses, which refuse bad values with a UserError."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from kvjax.attention import MECHANISMS
from kvjax.conversation.mixture import MixtureConfig
from kvjax.data.config import MIXTURE, PARENT, DataConfig, is_prepared
from kvjax.distributed.sharding import MeshConfig
from kvjax.foundation import runtime
from kvjax.foundation.configuration import between, checked, one_of, to_dataclass
from kvjax.foundation.errors import UserError
from kvjax.foundation.text import check_text
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import REMAT_POLICIES, Compute
from kvjax.optim import OptimizerConfig, learning_rate_schedule

DTYPES = ("auto", "float32", "bfloat16", "float64")
MAX_COUNT = (1 << 31) - 1  # steps are counted in int32
MAX_BATCH_SIZE = 1 << 24
MAX_SAMPLE_TOKENS = 1 << 16
# Removed keys that configs of old workdirs contain, by mechanism: key -> the value still allowed.
_REMOVED = {"tpa": {"fixed": "none", "shared_factors": False, "factor_init": "linear"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, data order, validation, checkpoints and handling of bad steps.

    Lengths are in optimizer steps; a batch is `batch_size` rows of data.sequence_length tokens.

    A step is bad if its loss or gradient norm is not finite, or, with spike_factor > 0, if its loss
    exceeds spike_factor times the exponential mean of good steps' losses (`program.MEAN_WEIGHT`).
    bad_steps = "stop" ends the run and keeps its checkpoints. "skip" discards the update but
    consumes the batch: parameters, optimizer state and the schedule's step stay unchanged, and
    skipped_steps in metrics.jsonl counts it. max_bad_steps skipped steps in a row end the run, and
    so do non-finite weights.
    """

    num_steps: int  # optimizer steps in total; 0: one epoch of config.mixture
    batch_size: int  # rows per step, over all devices and microbatches
    grad_accumulation: int = 1  # number of microbatches per step
    seed: int = 0  # of initial weights and the order of rows
    log_every: int = 10  # steps between records in metrics.jsonl
    eval_every: int = 250  # steps between validations; the last step has one too
    eval_rows: int = 0  # validation rows, from the start of the split; 0: all
    checkpoint_every: int = 250  # steps between checkpoints; the last step has one too
    keep_checkpoints: int = 2  # number of latest checkpoints to keep
    snapshot_every: int = 0  # steps between snapshots of parameters for analysis; 0: none
    stop_after: int = 0  # save and stop after this step, schedule unchanged; 0: run to the end
    bad_steps: str = "stop"  # on a bad step "stop" the run, or "skip" the step
    spike_factor: float = 0.0  # a loss above this times the recent mean is bad; 0: never
    max_bad_steps: int = 10  # bad steps in a row that end the run, with "skip"
    sample_prompt: str = "The king "  # prompt of the sample at the end
    sample_tokens: int = 100  # length of the sample at the end; 0: no sample
    separate: bool = False  # document mask: no attention across documents (each begins with a BOS)
    parent: str = ""  # workdir of the trained model that this run starts from; "": random weights
    teacher: str = ""  # workdir of the teacher for distillation; "": none
    teacher_share: float = 0.5  # share of KL(teacher || model) in the loss, with a teacher

    def __post_init__(self):
        def named(key):
            return f"config.train.{key}", getattr(self, key)

        for key in ("log_every", "eval_every", "checkpoint_every"):
            between(*named(key), 1, MAX_COUNT)
        for key in ("keep_checkpoints", "max_bad_steps"):
            between(*named(key), 1, MAX_COUNT)
        for key in ("num_steps", "eval_rows", "stop_after", "snapshot_every"):
            between(*named(key), 0, MAX_COUNT)
        between(*named("batch_size"), 1, MAX_BATCH_SIZE)
        between(*named("grad_accumulation"), 1, MAX_BATCH_SIZE)
        between(*named("seed"), 0, (1 << 32) - 1)
        between(*named("sample_tokens"), 0, MAX_SAMPLE_TOKENS)
        one_of("config.train.bad_steps", self.bad_steps, ("stop", "skip"))
        between(*named("teacher_share"), 0.0, 1.0)
        for key in ("parent", "teacher"):
            if getattr(self, key):
                runtime.path(*named(key))
        if self.spike_factor and not 1 < self.spike_factor <= 1e6:
            raise UserError(
                f"config.train.spike_factor = {self.spike_factor}: must be 0 (no check for spikes) "
                "or above 1, up to 1e6"
            )
        if self.batch_size % self.grad_accumulation:
            raise UserError(
                f"config.train.grad_accumulation = {self.grad_accumulation}: must divide "
                f"config.train.batch_size = {self.batch_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Options of `kvjax.model.transformer.Compute`; "auto" and -1 depend on the platform."""

    dtype: str = "auto"  # dtype of activations; "auto": float32 on CPU, bfloat16 elsewhere
    # Activations to recompute in the backward pass: "none"; "dots": all but products with weights;
    # "attention": all but outputs of the attention kernel; "full": all.
    remat: str = "none"
    unroll: str = "auto"  # unroll the scan over layers: "on", "off", "auto" (CPU, up to 8 layers)
    query_chunk: int = -1  # queries per chunk of XLA's attention; 0: all; -1: 64 on CPU, else all
    # Slices that a device's tokens are cut into, of whose logits one's are in memory: at least this
    # many, and more where a slice would have over 2^27 logits.
    loss_chunks: int = 8
    attention: str = "auto"  # "xla", "splash" (TPU), "cudnn" (GPU) or "auto" (by device)

    def __post_init__(self):
        one_of("config.compute.dtype", self.dtype, DTYPES)
        one_of("config.compute.remat", self.remat, tuple(REMAT_POLICIES))
        one_of("config.compute.unroll", self.unroll, ("auto", "on", "off"))
        between("config.compute.query_chunk", self.query_chunk, -1, MAX_COUNT)
        between("config.compute.loss_chunks", self.loss_chunks, 1, MAX_COUNT)
        one_of("config.compute.attention", self.attention, ("auto", "xla", "splash", "cudnn"))

    def resolve(self, platform: str, num_layers: int) -> Compute:
        """Returns the options for a platform: "cpu", "gpu" or "tpu"."""
        on_cpu = platform == "cpu"
        dtype = {"auto": "float32" if on_cpu else "bfloat16"}.get(self.dtype, self.dtype)
        if dtype == "float64" and not jax.config.jax_enable_x64:
            raise UserError("config.compute.dtype = 'float64': set JAX_ENABLE_X64=1")
        unroll = self.unroll == "on"
        if self.unroll == "auto":
            unroll = on_cpu and num_layers <= 8
        query_chunk = self.query_chunk
        if query_chunk < 0:
            query_chunk = 64 if on_cpu else 0
        return Compute(
            dtype=jnp.dtype(dtype),
            remat=self.remat,
            unroll=unroll,
            query_chunk=query_chunk,
            loss_chunks=self.loss_chunks,
            attention=None if self.attention == "auto" else self.attention,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A resolved config: everything that training depends on."""

    name: str
    model: TransformerConfig
    optimizer: OptimizerConfig
    data: DataConfig
    train: TrainConfig
    compute: ComputeConfig
    mesh: MeshConfig
    mixture: MixtureConfig | None = None  # conversations; None: text documents

    def __post_init__(self):
        check_name("config.name", self.name)
        self._check_mixture()
        if self.train.separate and self.compute.attention == "cudnn":
            raise UserError(
                "config.compute.attention = 'cudnn': does not support the document mask "
                "(config.train.separate); give 'auto' or 'xla'"
            )
        if self.train.num_steps:
            # Raises a UserError if warmup and cooldown are longer than the run.
            learning_rate_schedule(self.optimizer, self.train.num_steps)

    def uses_attention_kernel(self, platform: str) -> bool:
        """Returns True if training's attention can use a fused kernel on a platform."""
        if platform == "cpu" or self.compute.attention == "xla":
            return False
        if platform != "gpu":
            return True
        windows = any(kind.window for _, kind in self.model.layers)
        return not (self.train.separate or windows or self.model.block.attention_softcap)  # cuDNN

    def _check_mixture(self) -> None:
        """Raises a UserError if other keys contradict config.mixture, or its absence."""
        source, has_mixture = self.data.source, self.mixture is not None
        if has_mixture and source != MIXTURE and not is_prepared(source):
            raise UserError(
                f"config.data.source = {source!r}: with conversations (config.mixture) it must be "
                f"{MIXTURE!r}, or prepared: and the folder of their rows"
            )
        if not has_mixture and source == MIXTURE:
            raise UserError(
                f"config.data.source = {source!r}: needs config.mixture, which names "
                "conversations: see configs/mid.py"
            )
        if has_mixture and self.data.tokenizer == "bpe":
            raise UserError(
                "config.data.tokenizer = 'bpe': no tokenizer is trained on conversations; give "
                f"{PARENT!r} (the tokenizer of config.train.parent), 'byte' or a tokenizer.json"
            )
        if self.data.tokenizer == PARENT and not self.train.parent:
            raise UserError(
                f"config.data.tokenizer = {PARENT!r}: config.train.parent is empty; give the "
                "workdir of a trained model: --config.train.parent=runs/lrkv_128m"
            )
        if self.is_masked and self.train.teacher:
            raise UserError(
                f"config.train.teacher = {self.train.teacher!r}: distillation does not support a "
                "loss mask (config.mixture.loss, config.mixture.pack)"
            )
        if not has_mixture:
            between("config.train.num_steps", self.train.num_steps, 1, MAX_COUNT)

    @property
    def is_masked(self) -> bool:
        """True if rows have a loss mask."""
        return self.mixture is not None and self.mixture.is_masked

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.data.sequence_length


def check_name(key: str, name: str) -> None:
    """Raises a UserError unless the default workdir, runs/NAME, can have this name."""
    check_text(key, name)
    folders, fits = name.split("/"), name.isprintable() and len(name.encode()) <= 200
    if not name or name != name.strip() or ".." in folders or name[0] in "./" or not fits:
        raise UserError(
            f"{key} = {name!r}: must be a folder's name, as in sweeps/a (runs/NAME is the "
            "default workdir): at most 200 printable bytes, without '..', blanks at its ends, or a "
            "dot or '/' at its start"
        )


def resolve(config: ml_collections.ConfigDict) -> Experiment:
    """Resolves a config.

    Raises:
      UserError: an unknown or missing key, a wrong type, or a bad value; see each class.
    """
    sections = {
        "optimizer": OptimizerConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "compute": ComputeConfig,
        "mesh": MeshConfig,
    }
    known = {"name", "model", "attention", *sections}
    if set(config) - {"mixture"} != known:
        raise UserError(
            f"config: unknown {sorted(set(config) - known - {'mixture'})}, missing "
            f"{sorted(known - set(config))}"
        )
    if "mixture" in config:
        sections["mixture"] = MixtureConfig
    name = checked(config.name, str, "config.name")
    block = to_dataclass(BlockConfig, config.model, "config.model")
    resolved = {
        key: to_dataclass(cls, config[key], f"config.{key}") for key, cls in sections.items()
    }
    model = TransformerConfig(
        block=block,
        mechanisms=_mechanisms(config.attention, block.num_layers),
        vocab_size=resolved["data"].vocab_size,
    )
    model.check_length(resolved["data"].sequence_length)
    if not block.causal:
        raise UserError(
            "config.model.causal = False: next-token training needs a causal model; "
            "bidirectional models are built from kvjax.model directly"
        )
    return Experiment(name=name, model=model, **resolved)


def defaults(kind: str) -> dict[str, Any]:
    """Returns the default of every key that has one, by dotted name.

    Args:
      kind: the mechanism, `config.attention.kind`.
    """
    sections = {
        "model": BlockConfig,
        "attention": MECHANISMS[kind],
        "optimizer": OptimizerConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "compute": ComputeConfig,
        "mixture": MixtureConfig,
    }
    removed = {f"attention.{key}": value for key, value in _REMOVED.get(kind, {}).items()}
    return removed | {
        f"{section}.{field.name}": field.default
        for section, cls in sections.items()
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


def _mechanisms(attention: ml_collections.ConfigDict, num_layers: int) -> tuple:
    """Returns the mechanism of each layer, with its rank from `layer_ranks` if given."""
    section = dict(attention)
    kind = section.pop("kind", None)
    layer_ranks = section.pop("layer_ranks", ())
    one_of("config.attention.kind", kind, tuple(MECHANISMS))
    for key, default in _REMOVED.get(kind, {}).items():
        if (value := section.pop(key, default)) != default:
            raise UserError(
                f"config.attention.{key} = {value!r}: the key was removed, and with it every value "
                f"but {default!r}; leave it out"
            )
    section = ml_collections.ConfigDict(section)
    mechanism = to_dataclass(MECHANISMS[kind], section, "config.attention")
    ranks = checked(layer_ranks, tuple[int, ...], "config.attention.layer_ranks")
    if not ranks:
        return (mechanism,) * num_layers
    keys = rank_keys(mechanism)
    if not keys:
        raise UserError(f"config.attention.layer_ranks: {kind!r} has no rank; leave it empty")
    return tuple(_with_rank(mechanism, keys, rank, i) for i, rank in enumerate(ranks))


def rank_keys(mechanism) -> tuple[str, ...]:
    """Returns the keys that `layer_ranks` sets: rank, or those of key_rank and value_rank > 0."""
    if hasattr(mechanism, "rank"):
        return ("rank",)
    return tuple(key for key in ("key_rank", "value_rank") if getattr(mechanism, key, 0))


def _with_rank(mechanism, keys: tuple[str, ...], rank: int, layer: int):
    try:
        return dataclasses.replace(mechanism, **dict.fromkeys(keys, rank))
    except UserError as error:
        raise UserError(f"config.attention.layer_ranks[{layer}] = {rank}: {error}") from error
