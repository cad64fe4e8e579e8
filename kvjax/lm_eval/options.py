"""Checks the options of `adapter.KvjaxLM` before weights are read."""

from etils import epath
import jax

from kvjax import config as config_lib
from kvjax.cache import quantized
from kvjax.decoding import program
from kvjax.decoding.generator import max_positions
from kvjax.decoding.scoring import BATCH
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained


def find(
    workdir: epath.PathLike,
    *,
    step: int | None = None,
    dtype: str = "",
    cache_dtype: str = "",
    batch_size: int = BATCH,
    max_length: int | None = None,
    chips: int = 1,
    device: str | None = None,
) -> trained.SavedModel:
    """Returns the checkpoint of a workdir; the options are those of `adapter.KvjaxLM`.

    Raises:
      UserError: an option is invalid, there is no such checkpoint, or the model has fewer positions
        than `max_length`.
    """
    if dtype:
        one_of("dtype", dtype, config_lib.DTYPES)
    quantized.bits_of(cache_dtype)
    if type(batch_size) is not int:
        raise UserError(f"batch_size = {batch_size!r}: must be a whole number")
    at_least("batch_size", batch_size, 1)
    if max_length is not None:
        at_least("max_length", max_length, 2)
    if chips != 1:
        program.make_mesh(chips, jax.local_devices())
    platform = jax.devices()[0].platform
    if device not in (None, platform):
        raise UserError(
            f"device = {device!r}: JAX uses {platform!r}; JAX_PLATFORMS selects another"
        )
    if not workdir:
        raise UserError("--workdir is missing: give the folder of a trained run, as runs/lrkv_tiny")
    saved = trained.find(workdir, step=step)
    trained.compute_of(saved.experiment, dtype, cache_dtype)
    limit = max_positions(saved.experiment.model, chips)
    if max_length is not None and limit is not None and max_length > limit:
        raise UserError(f"max_length = {max_length}: the model has only {limit} positions")
    return saved
