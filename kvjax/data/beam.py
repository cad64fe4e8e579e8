"""Parts of a corpus tokenized by Apache Beam: on Dataflow, Flink, Spark or this machine.

The launcher looks at the sources, makes the tokenizer and writes the manifest; workers make parts,
each by itself, and put its shards and then its mark at the target. What is made stays, so that the
same command goes on after a failure. Needs the extra `beam`, on the workers too, and a target and
sources that all of them see (a bucket, or a folder they mount).
"""

from collections.abc import Sequence
import contextlib
import importlib.util
import io
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from kvjax.data import (
    partial_dataset as partial_dataset_lib,
    pool,
    preparation,
    readers,
    tokenizer as tokenizer_lib,
)
from kvjax.data.parts import Part
from kvjax.data.preparation import Preparation
from kvjax.foundation.errors import DataError, UserError

_NOT_SEEN = (
    "is not seen by a Beam worker: --output must be a bucket, or a folder that all workers mount"
)


def pipeline(options: str) -> beam.Pipeline:
    """A pipeline with comma-separated options, as TFDS takes them: runner=FlinkRunner,a=b.

    Raises:
      UserError: an option or a runner that Beam does not take, or whose library is missing.
    """
    flags = [f"--{option.strip()}" for option in options.split(",") if option.strip()]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # argparse's usage
            parsed = PipelineOptions(flags)
            parsed.get_all_options(retain_unknown_options=True)  # checks their values
            made = beam.Pipeline(options=parsed)
    except SystemExit as error:
        raise _refused(options, said.getvalue().strip().rpartition("error: ")[2]) from error
    except (ImportError, ValueError, AttributeError, NotImplementedError) as error:
        raise _refused(options, str(error)) from error
    runner = parsed.view_as(StandardOptions).runner or ""
    if runner.endswith("DataflowRunner") and importlib.util.find_spec("google.auth") is None:
        raise _refused(
            options, "Dataflow needs: pip install -c constraints-beam.txt 'apache-beam[gcp]'"
        )
    return made


def make(making: Preparation, options: str) -> None:
    """Makes the parts that are not done yet.

    Raises:
      UserError: see `pipeline`; a part that cannot be made, others stay.
    """
    missing = [making.corpus.parts[i] for i in making.partial.missing()]
    made = pipeline(options)
    made | beam.Create(missing) | beam.Reshuffle() | beam.ParDo(_MakePart(making))
    try:
        made.run().wait_until_finish()
    except (UserError, ImportError, OSError, RuntimeError, NotImplementedError) as error:
        if _NOT_SEEN in str(error):
            raise UserError(f"{making.partial.folder} {_NOT_SEEN}") from error
        if failed := making.partial.failures():
            raise UserError(failed[0]) from error
        if making.partial.any_done() or not _is_of_runner(error):
            raise  # with its traceback: what is done stays
        raise _refused(options, str(error)) from error
    if failed := making.partial.failures():
        more = f" ({len(failed) - 1} more parts failed)" if len(failed) > 1 else ""
        raise DataError(f"{failed[0]}{more}")


def _refused(options: str, why: str) -> UserError:
    return UserError(f"--beam_pipeline_options={options}: {' '.join(why.split())[:500]}")


def _is_of_runner(error: Exception) -> bool:
    """Whether a runner's own program is missing, which some look for when a pipeline starts."""
    said = str(error).lower()
    kinds = (ImportError, NotImplementedError)
    return isinstance(error, kinds) or any(w in said for w in ("job server", "java", "prism bin"))


class _MakePart(beam.DoFn):
    """Makes a part at the target."""

    def __init__(self, making: Preparation):
        corpus = making.corpus
        self._given = corpus.config, making.partial, corpus.skip_broken
        self._tokenizer_json = making.tokenizer.to_json()
        self._code = preparation.code()

    def setup(self) -> None:
        self._tokenizer = tokenizer_lib.from_json(
            self._tokenizer_json, "the launcher's tokenizer", threads=1
        )

    def process(self, part: Part) -> Sequence[Any]:
        config, partial, skip_broken = self._given
        if partial_dataset_lib.read_plan(partial.folder) is None:
            raise UserError(f"{partial.folder} {_NOT_SEEN}")
        try:
            if preparation.code() != self._code:
                raise DataError(
                    "a Beam worker has other code or libraries than the launcher: install the same "
                    "kvjax, with constraints-beam.txt, on both"
                )
            pool.make_part(config, part, self._tokenizer, partial, skip_broken=skip_broken)
        except UserError as error:
            broken = isinstance(error, readers.SourceError)
            partial.fail(part.index, str(error), broken=broken)
            if not isinstance(error, DataError):
                raise  # no room, no network: a retry may end otherwise
        return ()
