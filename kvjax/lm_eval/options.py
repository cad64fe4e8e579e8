"""What a model is asked with, checked before any weight is read."""

from etils import epath
import jax

from kvjax import experiment
from kvjax.decoding import program
from kvjax.decoding.generator import max_positions
from kvjax.decoding.scoring import BATCH
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained


def check(
    *,
    dtype: str = "",
    batch_size: int = BATCH,
    max_length: int | None = None,
    chips: int = 1,
    device: str | None = None,
) -> None:
    """Raises a UserError for an option that can be of no model; see `adapter.KvjaxLM`."""
    if dtype:
        one_of("dtype", dtype, experiment.DTYPES)
    if type(batch_size) is not int:
        raise UserError(f"batch_size = {batch_size!r}: must be a whole number")
    at_least("batch_size", batch_size, 1)
    if max_length is not None:
        at_least("max_length", max_length, 2)
    if chips != 1:
        program.make_mesh(chips, jax.local_devices())
    here = jax.devices()[0].platform
    if device not in (None, here):
        raise UserError(f"device = {device!r}: JAX computes on {here!r}; JAX_PLATFORMS chooses")


def find(
    workdir: epath.PathLike,
    *,
    step: int | None = None,
    max_length: int | None = None,
    chips: int = 1,
) -> trained.SavedModel:
    """The checkpoint of a workdir; see `adapter.KvjaxLM`.

    Raises:
      UserError: it is not there, or cannot read as many tokens.
    """
    if not workdir:
        raise UserError("--workdir is missing: give the folder of a trained run, as runs/lrkv_tiny")
    found = trained.find(workdir, step=step)
    limit = max_positions(found.experiment.model, chips)
    if max_length is not None and limit is not None and max_length > limit:
        raise UserError(f"max_length = {max_length}: the model has positions for {limit} tokens")
    return found
