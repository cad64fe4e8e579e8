"""Writes a model as a workdir that generation, training and analysis read like a run's.

The workdir gets its name only when it is complete.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import uuid

from etils import epath
from flax import traverse_util
import jax
import numpy as np

from kvjax import config as config_lib, recipes
from kvjax.convert import model as model_lib
from kvjax.convert.model import LazyModel
from kvjax.data import manifest
from kvjax.foundation import json_text, progress, runtime, target
from kvjax.foundation.configuration import to_text
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket, write_atomically
from kvjax.workdir import identity, origin, streamed
from kvjax.workdir.checkpoint import CHECKPOINTS

RECORD = "conversion.json"
RECOVERY = "recover.py"
_STAGING = ".staging-kvjax-convert-"
_NEW = ".new"


def check(out: str) -> epath.Path:
    """Returns the folder to write; raises a UserError if it exists or cannot be written."""
    path = runtime.path("--out", out)
    if in_bucket(path):
        raise UserError(f"--out = {out!r}: must be local; copy it to the bucket afterwards")
    path = epath.Path(os.path.realpath(path))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--out = {out!r}: exists already: give another, or move it away")
    config_lib.check_name("--out", path.name)
    if re.search(r"@\d+$", path.name):
        raise UserError(f"--out = {out!r}: must not end in @NUMBER, which names a step")
    if pathlib.Path.cwd().is_relative_to(path) or os.path.ismount(path):
        raise UserError(f"--out = {out!r}: cannot be replaced: give a new folder in it")
    runtime.folder("--out", path.parent)
    target.try_files(f"--out = {out!r}", path.parent, [_staging(path).name])
    return path


def write(model: LazyModel, out: epath.Path, record: dict, *, tune: str = "qk") -> None:
    """Writes a workdir with a checkpoint of step 0.

    Args:
      record: contents of conversion.json, JSON-compatible; written after all weights.
      tune: parameters that recover.py tunes, a key of `recipes.TUNED`.

    Raises:
      UserError, OSError: the workdir cannot be written; nothing is left behind.
    """
    with staged(out) as staging:
        _write(model, staging, out.name, record)
        context = min(_RECOVERY_LENGTH, model.context)
        recovery = _RECOVERY.replace("TUNE", tune).replace("LENGTH", str(context))
        (staging / RECOVERY).write_text(recovery)


@contextlib.contextmanager
def staged(out: epath.Path) -> Iterator[epath.Path]:
    """Yields a folder beside `out` that is renamed to it when the block succeeds.

    Raises:
      UserError, OSError: the folder cannot be written; nothing is left behind.
    """
    staging = _staging(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out.parent)
        # Until it is locked, the folder has a name that `_remove_abandoned` does not look for.
        new = out.parent / f"{_NEW}{staging.name}"
        new.mkdir()
        with _locked(new):
            try:
                new.rename(staging)
                yield staging
                os.rename(staging, out)  # `out` is absent or an empty folder
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}; nothing is left there"
        ) from error


def _staging(out: epath.Path) -> epath.Path:
    return out.parent / f"{_STAGING}{uuid.uuid4().hex}"


@contextlib.contextmanager
def _locked(folder: epath.PathLike) -> Iterator[bool]:
    """Locks a folder; yields False if another process has it or its file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: epath.Path) -> None:
    """Removes the folders of killed conversions, which no process locks."""
    for folder in pathlib.Path(parent).glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError), _locked(folder) as is_locked:
            if is_locked:
                shutil.rmtree(folder, ignore_errors=True)


def _write(model: LazyModel, workdir: epath.Path, name: str, record: dict) -> None:
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
        layers = [
            (s, i) for s, (_, n) in enumerate(model.transformer.layer_groups) for i in range(n)
        ]
        for done, (segment, layer) in enumerate(layers):
            doing.at(f"{done} of {len(layers)} layers")
            for path in parameters:
                if path[:2] == ("segments", segment):
                    array = np.asarray(model.read(path, layer), parameters[path][1])
                    put(path, array, index=layer)
    identity.write_model_identity(workdir, config)
    (workdir / manifest.TOKENIZER).write_text(model.tokenizer_json)
    if model.chat_template is not None:
        (workdir / origin.CHAT_TEMPLATE).write_text(model.chat_template)
    for file, content in model.token_files.items():
        (workdir / file).write_text(json.dumps(content, indent=2) + "\n")
    write_record(workdir, record)
    (workdir / "config.txt").write_text(to_text(config))


def write_record(workdir: epath.Path, record: dict) -> None:
    """Writes conversion.json atomically."""
    write_atomically(workdir / RECORD, json.dumps(json_text.plain(record), indent=1) + "\n")


_RECOVERY_LENGTH = 2048  # tokens per row (thin keys, section 3.7)
_RECOVERY = '''"""Fine-tunes the converted weights: python -m kvjax.main --config=THIS_FILE

`python -m kvjax.main --help` lists all keys.
"""

import pathlib

from kvjax import recipes


def get_config():
    return recipes.recover(
        pathlib.Path(__file__).parent,
        tune="TUNE",  # "qk", "qkv" or "attention"
        teacher="",  # workdir of the unconverted model, for distillation
        data=dict(source="embedded", sequence_length=LENGTH),
        train=dict(num_steps=3_662, batch_size=8, grad_accumulation=8),
    )
'''
