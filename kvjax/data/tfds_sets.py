"""Opens TFDS data sets that are prepared as ArrayRecord, and builds or converts others.

Opening needs no TensorFlow. Converting needs it always, and building for most data sets; the extra
`tfds` installs it.
"""

import contextlib
import functools
import importlib.util
import os
import shlex
import sys

from etils import epath

from kvjax.data.readers import SourceError
from kvjax.foundation import extras, progress
from kvjax.foundation.errors import first_line

PREFIX = "tfds:"
FORMAT = "array_record"


def split_name(source: str) -> tuple[str, str]:
    """Returns (name, split) of `tfds:NAME#SPLIT`; the split is "" if it is not given."""
    name, _, split = source.removeprefix(PREFIX).partition("#")
    return name, split


def folder() -> str:
    """Returns the folder of all TFDS data sets, as TFDS chooses it: TFDS_DATA_DIR, or in HOME."""
    return os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


@functools.cache
def builder(name: str):
    """Returns the TFDS builder of a data set that is prepared as ArrayRecord.

    Raises:
      SourceError: the data set is unknown, not prepared, or in another format; the message has the
        command that prepares it.
    """
    opened = _builder(name)
    if not opened.is_prepared():
        raise SourceError(
            f"tfds:{name} cannot be opened: {os.fspath(opened.data_dir)} does not exist. Set "
            f"TFDS_DATA_DIR to the folder that has {name.partition('/')[0]}/, or build it there: "
            f"{_build_command(name)}"
        )
    formats = _formats(opened)
    if FORMAT not in formats:
        raise SourceError(
            f"tfds:{name} is prepared as {', '.join(formats)} in {os.fspath(opened.data_dir)}, not "
            f"as ArrayRecord. Convert it there: {_build_command(name)}"
        )
    return opened


def build(name: str) -> None:
    """Builds a data set as ArrayRecord in `folder()`, or converts it from another format.

    Does nothing if it is there as ArrayRecord.

    Raises:
      SourceError: the data set is unknown, or its code fails: for example, there is no network, a
        package is missing, or files must be downloaded by hand.
    """
    opened = _builder(name)
    if opened.is_prepared() and FORMAT in _formats(opened):
        return
    doing = "converting" if opened.is_prepared() else "building"
    if opened.is_prepared():
        extras.require(f"{doing} tfds:{name}", "tensorflow")
    try:
        with progress.waiting(f"{doing} tfds:{name}"), contextlib.redirect_stdout(sys.stderr):
            if opened.is_prepared():
                _convert(opened)
            else:
                opened.download_and_prepare(file_format=FORMAT)
    except ImportError as error:
        if importlib.util.find_spec("tensorflow") is None:
            raise SourceError(
                f"building tfds:{name} needs tensorflow, which is not installed: "
                f"{extras.command('tensorflow')}"
            ) from error
        raise SourceError(f"{doing} tfds:{name} failed: {error}") from error
    except Exception as error:  # the data set's own code may raise anything
        lines = " ".join(str(error).split())  # instructions for manual downloads are in the last
        raise SourceError(
            f"{doing} tfds:{name} in {folder()} failed: {lines or type(error).__name__}"
        ) from error
    builder.cache_clear()


def _builder(name: str):
    """Returns the TFDS builder of a data set, prepared or not, from its code or its files."""
    import tensorflow_datasets as tfds  # takes 0.5 s, and most runs read no TFDS source

    try:
        opened = tfds.builder(name, data_dir=folder())
        if opened.is_prepared() and FORMAT not in _formats(opened):
            # A builder made from code does not read which formats a conversion has added.
            opened = tfds.builder_from_directory(opened.data_dir)
        return opened
    except Exception as error:  # also from the data set's own code
        raise SourceError(
            f"tfds:{name} cannot be opened: {first_line(error)}. It was looked for in "
            f"TFDS's catalogue and in {folder()}: set TFDS_DATA_DIR to the folder that has it"
        ) from error


def _formats(opened) -> list[str]:
    """Returns the file formats in which a data set is prepared."""
    return [kind.value for kind in opened.info.available_file_formats()]


def _convert(opened) -> None:
    """Writes a data set's shards as ArrayRecord beside the others, with the same examples.

    Does the same as `tfds convert_format`, but without Apache Beam and mlcroissant. After a kill,
    the next call writes the missing shards only.
    """
    from tensorflow_datasets.core import dataset_info, file_adapters
    from tensorflow_datasets.core.utils import py_utils

    kind, target = opened.info.file_format, file_adapters.FileFormat(FORMAT)
    read = file_adapters.ADAPTER_FOR_FORMAT[kind].make_tf_data
    write = file_adapters.ADAPTER_FOR_FORMAT[target].write_examples
    for split in opened.info.splits.values():
        names = split.filename_template.replace(filetype_suffix=target.file_suffix)
        for i, path in enumerate(split.filepaths):
            shard = epath.Path(names.sharded_filepath(shard_index=i, num_shards=split.num_shards))
            if not shard.exists():
                with py_utils.incomplete_file(shard) as file:
                    write(path=file, iterator=enumerate(row.numpy() for row in read(path)))
    info = dataset_info.read_proto_from_builder_dir(opened.data_dir)
    info.alternative_file_formats.append(FORMAT)
    dataset_info.write_dataset_info_proto(info, dataset_info_dir=epath.Path(opened.data_dir))


def _build_command(name: str) -> str:
    """Returns the command line that builds or converts a data set, after installing TensorFlow."""
    command = f"python -m kvjax.data.prepare {shlex.quote(f'--source=tfds:{name}')} --build_only"
    if importlib.util.find_spec("tensorflow") is None:
        return f"{extras.command('tensorflow')} && {command}"
    return command
