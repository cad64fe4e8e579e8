"""Checks a run before anything expensive: its config, the machine, the workdir, the data."""

from collections.abc import Iterator
import contextlib
import dataclasses
import math
import socket
from typing import NamedTuple

from etils import epath
import jax
import ml_collections

from kvjax import config as config_lib, distributed
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.data import loader, manifest, preparation, preparation_estimate, prepare, vocabulary
from kvjax.data.config import PARENT, PREPARE_HOURS, DataConfig, is_prepared
from kvjax.data.tokenizer import CONVERSATION_SPECIALS
from kvjax.distributed import sharding
from kvjax.foundation import progress, runtime
from kvjax.foundation.checkout import package_digest
from kvjax.foundation.configuration import to_text
from kvjax.foundation.errors import UserError
from kvjax.foundation.rounding import round_up
from kvjax.kernels.softmax_attention.api import zigzag
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.optim import trainable
from kvjax.training import conversations, memory_estimate
from kvjax.workdir import checkpoint, identity, lineage, origin, storage, trained

_GPU_ROOM = 72 * 10**9  # bytes of an 80 GB device that a run can use
_MARGIN = 1.25  # a run is refused if its estimate exceeds an accelerator's memory by this factor


class PreparedRun(NamedTuple):
    """A resolved config, and the mesh, workdir, data and models that it names."""

    experiment: Experiment
    compute: Compute
    mesh: jax.sharding.Mesh
    workdir: epath.Path
    dataset: loader.PackedDataset
    parent: trained.SavedModel | None  # provides the initial weights; None once the run has begun
    teacher: trained.SavedModel | None

    def summary(self, start: int) -> str:
        """Returns the first lines of a run that starts at a step."""
        e, processes = self.experiment, distributed.count()
        counts = formulas.parameters(e.model)
        cache = formulas.cache_bytes_per_token(e.model, self.compute.dtype)
        return (
            f"{e.name}: {counts['total']:,} parameters, {cache:,} cache bytes per token "
            f"({self.compute.dtype}), {e.train.num_steps:,} steps of {e.tokens_per_step:,} tokens, "
            f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"
            + (f", {processes} processes" if processes > 1 else "")
            + f"\nworkdir {self.workdir}"
            + (f", resuming from step {start:,}" if start else "")
        )


@contextlib.contextmanager
def prepare_run(
    config: ml_collections.ConfigDict, workdir: epath.PathLike, hours: float
) -> Iterator[PreparedRun]:
    """Checks a run and prepares its data; holds the workdir's lock until the block ends.

    Args:
      hours: most hours that preparing the data may take, by estimate.

    Raises:
      UserError: the config does not fit the workdir, the data or the machine.
    """
    check_processes(config)
    experiment = config_lib.resolve(config)
    workdir = runtime.workdir(
        workdir
    )  # after `resolve`, which checks NAME of the default runs/NAME
    data, padded = experiment.data, bool(experiment.train.parent)
    if data.tokenizer not in ("bpe", PARENT) and not is_prepared(data.source):
        tokenizer = vocabulary.load(data)
        if experiment.mixture is not None:
            tokenizer = tokenizer.with_specials(CONVERSATION_SPECIALS)
        _check_vocab_size(tokenizer.vocab_size, data, padded, f"tokenizer {data.tokenizer!r}")
    begun = bool(storage.steps(workdir / checkpoint.CHECKPOINTS))
    parent, teacher = find_parent_and_teacher(experiment, begun=begun)
    mesh, compute = check_against_machine(experiment, teacher)
    # From here on files are written.
    with identity.exclusive(workdir):
        distributed.check_shared(workdir)
        first = distributed.index() == 0
        if first:
            identity.set_aside_earlier_run(workdir)
            if experiment.train.num_steps:
                identity.check_config(workdir, config, compute.dtype)
        if experiment.mixture is None:
            dataset = prepare_dataset(data, hours, padded=padded)
        else:
            dataset = conversations.prepare_dataset(experiment, workdir, parent)
            config, experiment = conversations.one_epoch(config, experiment, dataset)
            if first:  # again, since `one_epoch` may have set the number of steps
                identity.check_config(workdir, config, compute.dtype)
        if first:
            identity.check_data(workdir, dataset)
        check_tokenizer(experiment, dataset, parent=parent, teacher=teacher)
        if first:
            identity.write_run_identity(workdir, config, compute.dtype, dataset)
            if not begun:
                _record_parent(workdir, parent)
        distributed.gather("claimed", "")  # fails on all processes if the first one's checks do
        yield PreparedRun(experiment, compute, mesh, workdir, dataset, parent, teacher)


def check_against_machine(
    experiment: Experiment, teacher: trained.SavedModel | None
) -> tuple[jax.sharding.Mesh, Compute]:
    """Returns the mesh and the compute options for its platform.

    Raises:
      UserError: the mesh does not fit the devices, or does not divide model and batch; or the
        devices lack the memory.
    """
    mesh = sharding.make_mesh(experiment.mesh, jax.devices())
    platform = mesh.devices.flat[0].platform
    compute = experiment.compute.resolve(platform, experiment.model.block.num_layers)
    check_mesh(experiment, mesh)
    check_memory(experiment, compute, mesh, teacher)
    return mesh, compute


def _record_parent(workdir: epath.Path, parent: trained.SavedModel | None) -> None:
    """Records the parent in a new run's workdir: context, chat templates, hash of parameters."""
    if parent is None:
        origin.inherit(workdir, None)
        lineage.remove(workdir)
        return
    origin.inherit(workdir, parent.workdir, parent.context)
    with progress.waiting(f"hashing the parameters of {parent.workdir}"):
        lineage.write(workdir, parent.workdir, parent.checkpoints, parent.step)


def check_processes(config: ml_collections.ConfigDict) -> None:
    """Raises a UserError on every process unless all run the same config with the same code."""
    settings = {"jax": jax.__version__, "kvjax's code": package_digest()[:12]}
    for line in to_text(config).splitlines():
        key, value = line.split(" = ", 1)
        settings[f"config.{key}"] = value
    distributed.check_same(settings)


def prepare_dataset(
    data: DataConfig, hours: float = PREPARE_HOURS, *, padded: bool = False
) -> loader.PackedDataset:
    """Opens the data set; if necessary, the processes that share its folder first prepare it.

    Args:
      hours: most hours that preparing it may take, by estimate.
      padded: the model may have more rows than the tokenizer has tokens, as published models do.

    Raises:
      UserError: see `prepare`; the tokenizer's size is not config.data.vocab_size; processes have
        different data (raised on all of them).
    """
    if is_prepared(data.source) or distributed.count() == 1:
        path = prepare.prepare(data, hours=hours)
    else:
        path = _prepare_together(data, hours)
    dataset = loader.open_dataset(path)
    _check_vocab_size(dataset.vocab_size, data, padded, f"tokenizer of {dataset.path}")
    advice = "the same config.data.source, or one they share"
    distributed.check_same_rows(dataset.path, dataset.digest, advice)
    return dataset


def _check_vocab_size(vocab_size: int, data: DataConfig, padded: bool, source: str) -> None:
    """Raises a UserError unless config.data.vocab_size is the tokenizer's size.

    With a tokenizer.json it may also be that size rounded up to a multiple of 64 or 128.

    Args:
      padded: see `prepare_dataset`.
      source: names the tokenizer in the message.
    """
    rounded = [round_up(vocab_size, multiple) for multiple in (64, 128)]
    if data.tokenizer.endswith(".json") and data.vocab_size in rounded:
        return
    if vocab_size != data.vocab_size and not (padded and vocab_size < data.vocab_size):
        raise UserError(
            f"config.data.vocab_size = {data.vocab_size}: the {source} has {vocab_size}; set "
            f"--config.data.vocab_size={vocab_size}"
        )


def _prepare_together(data: DataConfig, hours: float) -> epath.Path:
    """Prepares a share of the data in each process; returns the folder of the data set.

    Of the processes that share the folder, the leader creates it, waits until all have written
    their parts, and completes it.
    """
    team = distributed.Team("data", data.root)
    leads = team.index == 0
    hosts = distributed.gather("hosts", socket.gethostname())
    workers = max(1, runtime.cores() // hosts.count(hosts[distributed.index()]))
    if not leads:
        team.wait_for("begun", leader=True)
    corpus = preparation.inspect_sources(data, shown=leads)
    if corpus.parts and leads:
        preparation_estimate.check(corpus, workers * team.size, hours, shown=True)
    unfinished = preparation.begin(corpus, shown=leads) if corpus.parts else None
    team.announce("begun")
    if unfinished:
        unfinished.make(workers=workers, share=(team.index, team.size), shown=leads)
    team.announce("made")
    if leads:
        team.wait_for("made")
        if unfinished:
            unfinished.make()  # parts still missing because a process has other sources
            unfinished.finish()
        team.announce("finished")
    team.wait_for("finished", leader=True)
    return prepare.prepare(data, hours=hours, shown=leads)  # finds what was just finished


def find_parent_and_teacher(
    experiment: Experiment, *, begun: bool
) -> tuple[trained.SavedModel | None, trained.SavedModel | None]:
    """Finds the models that the config names.

    Args:
      begun: the run has a checkpoint, and so no longer needs its parent.

    Raises:
      UserError: a named workdir has no checkpoint; the parent is a different model; the teacher has
        another vocabulary; the model lacks a parameter of config.optimizer.tuned.
    """
    c, model = experiment.train, experiment.model
    shapes, axes = parameters.abstract(model)
    trainable(experiment.optimizer, axes)
    parent = trained.named("config.train.parent", c.parent) if c.parent and not begun else None
    if parent:
        expected = conversations.parent_model(experiment, parent)
        shapes = parameters.abstract(expected).shapes
        checkpoint.check_parameters(parent.checkpoints, parent.step, shapes)
        if _as_trained(parent.experiment.model) != _as_trained(expected):
            raise UserError(
                f"config.train.parent = {c.parent!r}: its weights have this model's shapes, but it "
                "is a different model: set config.model and config.attention as in "
                f"{parent.workdir / 'config.txt'}"
            )
    teacher = trained.named("config.train.teacher", c.teacher) if c.teacher else None
    if teacher and teacher.experiment.model.vocab_size != model.vocab_size:
        raise UserError(
            f"config.train.teacher = {c.teacher!r}: has a vocabulary of "
            f"{teacher.experiment.model.vocab_size}, this model {model.vocab_size}"
        )
    if teacher:
        try:
            teacher.experiment.model.check_length(experiment.data.sequence_length)
        except UserError as error:
            raise UserError(f"config.train.teacher = {c.teacher!r}: {error}") from error
    return parent, teacher


def _as_trained(model: TransformerConfig) -> TransformerConfig:
    """Returns a config in which keys that do not matter to a trained model have fixed values."""
    block = dataclasses.replace(
        model.block, matrix_std=0.0, embedding_std=1.0, zero_outputs=True, dropout=0.0
    )
    return dataclasses.replace(model, block=block)


def check_tokenizer(
    experiment: Experiment, dataset: loader.PackedDataset, **models: trained.SavedModel | None
) -> None:
    """Raises a UserError unless `models` (parent, teacher) share the data set's vocabulary."""
    for key, model in models.items():
        if model is None:
            continue
        tokenizer = model.tokenizer
        if experiment.mixture is not None:
            tokenizer = tokenizer.with_specials(CONVERSATION_SPECIALS)
        if tokenizer.vocabulary() != dataset.tokenizer.vocabulary():
            file = model.workdir / manifest.TOKENIZER
            raise UserError(
                f"config.train.{key} = {getattr(experiment.train, key)!r}: its tokenizer is not "
                f"that of {dataset.path}: set config.data.tokenizer = {str(file)!r}"
            )


def check_mesh(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises a UserError unless the mesh divides weights, sequence length and microbatches."""
    weights = parameters.abstract(experiment.model)
    try:
        sharding.parameter_shardings(mesh, *weights)
    except UserError as error:
        raise UserError(f"{error}. {_mesh_that_divides(mesh, weights)}") from error
    if mesh.shape["sequence"] > 1:
        zigzag(experiment.data.sequence_length, mesh.shape["sequence"])
    c, shards = experiment.train, sharding.batch_shards(mesh)
    rows = c.batch_size // c.grad_accumulation
    if rows % shards:
        step = shards * c.grad_accumulation
        nearest = sorted({max(c.batch_size // step, 1) * step, (c.batch_size // step + 1) * step})
        raise UserError(
            f"config.train.batch_size = {c.batch_size}: microbatches of {rows} rows "
            f"(grad_accumulation = {c.grad_accumulation}) do not divide over config.mesh's data x "
            f"fsdp = {shards}; use a multiple of {step}: {' or '.join(map(str, nearest))}"
        )
    loader.share(sharding.batch_sharding(mesh), rows)


def _mesh_that_divides(mesh: jax.sharding.Mesh, weights: parameters.Parameters) -> str:
    """Advises a mesh of these devices that divides the weights: largest `tensor`, then `fsdp`."""
    devices = mesh.size // mesh.shape["sequence"]
    meshes = (
        {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}
        for tensor in reversed(sharding.divisors(mesh.shape["tensor"]))
        for fsdp in reversed(sharding.divisors(devices // tensor))
    )  # the last one, data = devices, always fits, since it shards no weight
    fitting = next(m for m in meshes if sharding.divides(dict(mesh.shape) | m, *weights))
    flags = " ".join(f"--config.mesh.{axis}={n}" for axis, n in fitting.items())
    return f"Over these {mesh.size} devices this mesh divides: {flags}"


def check_memory(
    experiment: Experiment,
    compute: Compute,
    mesh: jax.sharding.Mesh,
    teacher: trained.SavedModel | None = None,
) -> None:
    """Raises a UserError with the bytes per device if the devices cannot hold the run.

    An accelerator may be exceeded by the factor `_MARGIN`, since its compiler has the last word. A
    CPU may not, since the operating system would kill the run.
    """
    c, device = experiment.train, mesh.devices.flat[0]
    need = memory_estimate.estimate(
        experiment.model,
        compute,
        optimizer=experiment.optimizer,
        teacher=teacher and teacher.experiment.model,
        rows_per_device=c.batch_size // c.grad_accumulation // sharding.batch_shards(mesh),
        sequence_length=experiment.data.sequence_length,
        **{axis: mesh.shape[axis] for axis in ("fsdp", "tensor", "sequence")},
        accumulation_steps=c.grad_accumulation,
        attention_kernel=experiment.uses_attention_kernel(device.platform),
        lanes=memory_estimate.lane_width(device.platform),
    )
    available = runtime.memory_per_device()
    if need.total <= available * (1 if device.platform == "cpu" else _MARGIN):
        return

    def gb(count):
        return f"{count / 1e9:,.1f} GB"

    sharded = need.parameters + need.optimizer + need.gradients
    total = sharded * mesh.shape["fsdp"] * mesh.shape["tensor"] + need.activations * mesh.size
    room = _GPU_ROOM - need.weights  # every device gathers these
    enough = f"{math.ceil(total / room)} or more" if room > 0 else "no number of"
    raise UserError(
        f"{experiment.name} does not fit on {mesh.size} x {device.device_kind} "
        f"({device.platform}). Bytes per device:\n"
        f"  parameters   {gb(need.parameters):>12}\n"
        f"  optimizer    {gb(need.optimizer):>12}\n"
        f"  gradients    {gb(need.gradients):>12}\n"
        f"  weights used {gb(need.weights):>12}  (estimated)\n"
        f"  activations  {gb(need.activations):>12}  (estimated)\n"
        f"  needed       {gb(need.total):>12}\n"
        f"  available    {gb(available):>12}\n"
        f"With weights and batch sharded, this run fits on {enough} devices of 80 GB.\n"
        "A larger config.train.grad_accumulation and config.compute.remat = 'full' reduce the "
        "activations.\nThe configs configs/*_tiny.py run here, such as: python -m kvjax.main "
        "--config=configs/lrkv_tiny.py"
    )
