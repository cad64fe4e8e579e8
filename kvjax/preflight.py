"""What a run checks before anything expensive: batch, memory, and that the workdir is its own."""

import contextlib
import fcntl
import math

from etils import epath
import jax
import ml_collections

from kvjax import costs
from kvjax import runtime
from kvjax.data import tokenizer
from kvjax.errors import UserError
from kvjax.experiment import Experiment
from kvjax.model.transformer import Compute

# What may differ between a run and its continuation: when to look and when to stop, not what is
# computed.
_FREE_KEYS = {
    "train": (
        *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
        *("stop_after", "sample_prompt", "sample_tokens"),
    ),
    "compute": ("remat", "unroll", "query_chunk", "loss_chunks"),
    "data": ("directory",),
}


def check_processes() -> None:
    """Raises a UserError in a job of several processes."""
    if jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes: training runs in one process so far, on all the "
            "devices of its host; start it on one host"
        )


def check_vocabulary(experiment: Experiment) -> None:
    """Raises a UserError if a tokenizer that exists already has another vocabulary."""
    data = experiment.data
    if data.tokenizer == "bpe":
        return
    there = (
        tokenizer.byte_tokenizer()
        if data.tokenizer == "byte"
        else tokenizer.load(epath.Path(data.tokenizer).expanduser())
    )
    if there.vocab_size != data.vocab_size:
        raise UserError(
            f"config.data.vocab_size = {data.vocab_size}: the tokenizer {data.tokenizer!r} has "
            f"{there.vocab_size}; set the key to that"
        )


def check_batch(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises a UserError unless every part of a batch divides over the devices."""
    rows = experiment.train.batch_size // experiment.train.grad_accumulation
    if rows % mesh.size:
        raise UserError(
            f"config.train.batch_size = {experiment.train.batch_size} in "
            f"{experiment.train.grad_accumulation} part(s) is {rows} rows a part, which does not "
            f"divide over {mesh.size} devices; use a multiple of "
            f"{mesh.size * experiment.train.grad_accumulation}"
        )


def check_memory(experiment: Experiment, compute: Compute, mesh: jax.sharding.Mesh) -> None:
    """Raises a UserError, with the bytes by part, if the devices present cannot hold the run."""
    need = costs.training_memory(
        experiment.model,
        compute,
        rows_per_device=experiment.train.batch_size
        // experiment.train.grad_accumulation
        // mesh.size,
        sequence_length=experiment.data.sequence_length,
        shards=mesh.shape["fsdp"],
    )
    there = runtime.memory_per_device()
    if need.total <= there:
        return
    device = mesh.devices.flat[0]
    gb = lambda count: f"{count / 1e9:,.1f} GB"
    everything = (need.total - need.activations) * mesh.shape["fsdp"] + need.activations * mesh.size
    raise UserError(
        f"{experiment.name} does not fit on {mesh.size} x {device.device_kind} "
        f"({device.platform}). Bytes per device:\n"
        f"  parameters   {gb(need.parameters):>12}\n"
        f"  optimizer    {gb(need.optimizer):>12}\n"
        f"  gradients    {gb(need.gradients):>12}\n"
        f"  activations  {gb(need.activations):>12}  (estimated)\n"
        f"  needed       {gb(need.total):>12}\n"
        f"  available    {gb(there):>12}\n"
        "Weights and batch split over n devices need an nth each: "
        f"{math.ceil(everything / 72e9)} or more devices of 80 GB hold this run as it is.\n"
        "Activations shrink with a larger config.train.grad_accumulation and with "
        "config.compute.remat = 'full'.\nWhat runs here: python -m kvjax.main "
        "--config=configs/lrkv_tiny.py (or another of configs/*_tiny.py)"
    )


@contextlib.contextmanager
def exclusive(workdir: epath.Path):
    """Holds the workdir for this process; a UserError if another one has it.

    The lock is the operating system's, so it ends with its process, however that ends. Workdirs
    that are not local (gs://) have none.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if "://" in str(workdir) or jax.process_index():
        yield
        return
    with open(workdir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{workdir} is in use by another run: wait for it, or give another --workdir"
            ) from error
        yield


def identity(config: ml_collections.ConfigDict) -> dict:
    """The part of a config that a workdir belongs to."""
    tree = {k: dict(v) if hasattr(v, "items") else v for k, v in config.items() if k != "mesh"}
    for section, keys in _FREE_KEYS.items():
        tree[section] = {k: v for k, v in tree[section].items() if k not in keys}
    return tree
