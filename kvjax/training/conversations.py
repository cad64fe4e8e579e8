"""Training on conversations: prepares rows, sets the number of steps, and checks the vocabulary."""

import dataclasses

from etils import epath
import ml_collections

from kvjax import distributed
from kvjax.config import Experiment
from kvjax.conversation import prepare
from kvjax.data import loader, manifest, tokenizer as tokenizer_lib, vocabulary
from kvjax.data.config import PARENT, is_prepared
from kvjax.data.prepare import prepared_folder
from kvjax.data.tokenizer import CONVERSATION_SPECIALS, Tokenizer
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.workdir import trained


def parent_model(experiment: Experiment, parent: trained.SavedModel) -> TransformerConfig:
    """Returns the run's model with the vocabulary size of its parent, which must have that model.

    Raises:
      UserError: the run's vocabulary is too small for the parent's and the special tokens.
    """
    model, parent_size = experiment.model, parent.experiment.model.vocab_size
    if experiment.mixture is None:
        return model
    specials = parent.tokenizer.with_specials(CONVERSATION_SPECIALS)
    needed = max(parent_size, specials.vocab_size)
    if model.vocab_size < needed:
        raise UserError(
            f"config.data.vocab_size = {model.vocab_size}: config.train.parent = "
            f"{experiment.train.parent!r} has {parent_size}, and its tokenizer with the special "
            f"tokens of conversations needs {specials.vocab_size}: set "
            f"--config.data.vocab_size={needed}, or the next number that the mesh divides"
        )
    return dataclasses.replace(model, vocab_size=parent_size)


def prepare_dataset(
    experiment: Experiment, workdir: epath.Path, parent: trained.SavedModel | None
) -> loader.PackedDataset:
    """Opens the rows of a run on conversations; if necessary, the first process prepares them.

    Args:
      parent: None if the run has no parent, or has begun and has the tokenizer in its workdir.

    Raises:
      UserError: see `conversation.prepare`; the rows have a loss mask and the config has none, or
        the reverse; the tokenizer is larger than the model's vocabulary.
    """
    data = experiment.data
    if is_prepared(data.source):
        path = prepared_folder(data)
    else:
        path = _prepare_together(experiment, _tokenizer(experiment, workdir, parent))
    dataset = loader.open_dataset(path)
    if dataset.is_masked != experiment.is_masked:
        has = {True: "have a mask", False: "have no mask"}
        raise UserError(
            f"config.data.source = {data.source!r}: its rows {has[dataset.is_masked]}, but with "
            f"config.mixture.loss = {experiment.mixture.loss!r} and config.mixture.pack = "
            f"{experiment.mixture.pack!r} they must {has[experiment.is_masked]}"
        )
    if dataset.vocab_size > experiment.model.vocab_size:
        raise UserError(
            f"config.data.vocab_size = {data.vocab_size}: the tokenizer of {dataset.path} has "
            f"{dataset.vocab_size}; set --config.data.vocab_size={dataset.vocab_size}"
        )
    advice = "the same conversations, or config.data.directory in a folder that they share"
    distributed.check_same_rows(dataset.path, dataset.digest, advice)
    return dataset


def one_epoch(
    config: ml_collections.ConfigDict, experiment: Experiment, dataset: loader.PackedDataset
) -> tuple[ml_collections.ConfigDict, Experiment]:
    """Sets num_steps, if it is 0, to one epoch: each row once, without a last partial batch.

    Raises:
      UserError: there are too few rows for a step, or too few steps for the schedule.
    """
    if experiment.train.num_steps:
        return config, experiment
    rows, batch = dataset.num_rows("train"), experiment.train.batch_size
    if rows < batch:
        raise UserError(
            f"config.train.batch_size = {batch}: there are {rows} rows of conversations; give "
            f"--config.train.batch_size={rows} or less"
        )
    config = ml_collections.ConfigDict(config.to_dict())
    config.train.num_steps = rows // batch
    train = dataclasses.replace(experiment.train, num_steps=rows // batch)
    return config.lock(), dataclasses.replace(experiment, train=train)


def _tokenizer(
    experiment: Experiment, workdir: epath.Path, parent: trained.SavedModel | None
) -> Tokenizer:
    """Returns the run's tokenizer with the special tokens of conversations."""
    if experiment.data.tokenizer != PARENT:
        tokenizer = vocabulary.load(experiment.data)
    elif parent is not None:
        tokenizer = parent.tokenizer
    else:
        tokenizer = tokenizer_lib.load(workdir / manifest.TOKENIZER, "the workdir's tokenizer")
    return tokenizer.with_specials(CONVERSATION_SPECIALS)


def _prepare_together(experiment: Experiment, tokenizer: Tokenizer) -> epath.Path:
    """Prepares the rows in the first process that has the folder; returns the folder."""

    def rows(shown: bool) -> epath.Path:
        return prepare.prepare(experiment.mixture, experiment.data, tokenizer, shown=shown)

    if distributed.count() == 1:
        return rows(shown=True)
    team = distributed.Team("data", experiment.data.root)
    if team.index == 0:
        rows(shown=True)
        team.announce("finished")
    else:
        team.wait_for("finished", leader=True)
    return rows(shown=False)
