"""A model written as a workdir, as if a run had trained it: what generates, tunes and analyses
reads it there.

Nothing stands under the workdir's name before all of it is written.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import uuid

from etils import epath
from flax import traverse_util
import jax
import numpy as np

from kvjax import recipes
from kvjax.convert import model as model_lib
from kvjax.convert.model import Model
from kvjax.data import manifest
from kvjax.foundation import progress
from kvjax.foundation import runtime
from kvjax.foundation.configuration import to_text
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.workdir import identity
from kvjax.workdir import streamed
from kvjax.workdir.checkpoint import CHECKPOINTS

RECORD = "conversion.json"
RECOVERY = "recover.py"
_STAGING = ".staging-kvjax-convert-"


def check(out: str) -> epath.Path:
    """The workdir to write; a UserError where something is already, or in a bucket."""
    path = runtime.path("--out", out)
    if in_bucket(path):
        raise UserError(f"--out = {out!r}: must be local; copy it to the bucket afterwards")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--out = {out!r}: is there already: give another, or move it away")
    return path


def write(model: Model, out: epath.Path, record: dict) -> None:
    """Writes a workdir with a checkpoint of step 0.

    Args:
      record: JSON-able: where the model comes from; kept as conversion.json. Read when all weights
        are written.

    Raises:
      UserError, OSError: it cannot be written; nothing is left then.
    """
    with staged(out) as staging:
        _write(model, staging, out.name, record)


@contextlib.contextmanager
def staged(out: epath.Path) -> Iterator[epath.Path]:
    """A folder beside `out` that takes its name when the block has ended well.

    Raises:
      UserError, OSError: it cannot be written; nothing is left then.
    """
    staging = out.parent / f"{_STAGING}{out.name}-{uuid.uuid4().hex}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with _locked(out.parent):  # nobody sees a folder of ours that is not locked yet
                _remove_abandoned(out.parent)
                staging.mkdir()
                stack.enter_context(_locked(staging))
            yield staging
            if out.exists():
                out.rmdir()  # it is empty
            staging.rename(out)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: epath.Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Holds a lock of the operating system's, which ends with its process, however that ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(parent: epath.Path) -> None:
    """Removes what conversions that were killed left there."""
    for other in pathlib.Path(parent).glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError), _locked(other, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(other, ignore_errors=True)


def _write(model: Model, workdir: epath.Path, name: str, record: dict) -> None:
    attention = model_lib.attention_section(model.transformer)
    config = recipes.imported(name, model.transformer, attention, context=model.context)
    parameters = model.parameters()
    abstract = traverse_util.unflatten_dict(
        {path: jax.ShapeDtypeStruct(*parameters[path]) for path in parameters}
    )
    with (
        streamed.writing(workdir / CHECKPOINTS, shapes=abstract) as put,
        progress.waiting(f"writing {name}") as doing,
    ):
        outer = [path for path in parameters if path[0] != "segments"]
        for path in outer:
            put(path, np.asarray(model.read(path), parameters[path][1]))
        layers = [(s, i) for s, (_, n) in enumerate(model.transformer.segments) for i in range(n)]
        for done, (segment, layer) in enumerate(layers):
            doing.at(f"{done} of {len(layers)} layers")
            for path in parameters:
                if path[:2] == ("segments", segment):
                    array = np.asarray(model.read(path, layer), parameters[path][1])
                    put(path, array, index=layer)
    identity.write_model(workdir, config)
    (workdir / manifest.TOKENIZER).write_text(model.tokenizer_json)
    if model.chat_template is not None:
        (workdir / model_lib.CHAT_TEMPLATE).write_text(model.chat_template)
    (workdir / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    (workdir / RECOVERY).write_text(_RECOVERY)
    (workdir / "config.txt").write_text(to_text(config))


_RECOVERY = '''"""Tunes what the conversion made: python -m kvjax.main --config=THIS_FILE

Change what you like; every key is told by `python -m kvjax.main --help`.
"""

import pathlib

from kvjax import recipes


def get_config():
    return recipes.recover(
        pathlib.Path(__file__).parent,
        tune="qk",  # or "qkv", "attention"
        teacher="",  # the workdir of the model before conversion, to learn from it too
        data=dict(source="embedded", sequence_length=2048),
        train=dict(num_steps=3_662, batch_size=8, grad_accumulation=8),
    )
'''
