"""Tokenizes the parts of a corpus with Apache Beam: on Dataflow, Flink, Spark or this machine.

The launcher inspects the sources, trains the tokenizer and writes the manifest. Workers make parts
independently, and write each part's shards and then its mark to the target. Finished parts stay, so
that the same command resumes after a failure. Needs the extra `beam`, on the workers too, and a
target and sources that all of them can read (a bucket, or a mounted folder).
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
    tokenizer as tokenizer_lib,
)
from kvjax.data.parts import Part
from kvjax.data.preparation import Preparation
from kvjax.foundation.errors import DataError, UserError

_NOT_SEEN = (
    "is not visible to a Beam worker: --output must be a bucket, or a folder that all workers mount"
)


def pipeline(options: str) -> beam.Pipeline:
    """Returns a pipeline with comma-separated options, such as runner=FlinkRunner,a=b (like TFDS).

    Raises:
      UserError: an option or runner is unknown, or the runner's library is missing.
    """
    flags = [f"--{option.strip()}" for option in options.split(",") if option.strip()]
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):  # argparse prints its usage
            parsed = PipelineOptions(flags)
            parsed.get_all_options(retain_unknown_options=True)  # checks values
            built = beam.Pipeline(options=parsed)
    except SystemExit as error:
        raise _refused(options, usage.getvalue().strip().rpartition("error: ")[2]) from error
    except (ImportError, ValueError, AttributeError, NotImplementedError) as error:
        raise _refused(options, str(error)) from error
    runner = parsed.view_as(StandardOptions).runner or ""
    if runner.endswith("DataflowRunner") and importlib.util.find_spec("google.auth") is None:
        raise _refused(
            options, "Dataflow needs: pip install -c constraints-beam.txt 'apache-beam[gcp]'"
        )
    return built


def make(job: Preparation, options: str) -> None:
    """Makes the parts that are not finished yet.

    Raises:
      UserError: see `pipeline`; a part cannot be made (finished parts stay).
    """
    missing = [job.corpus.parts[i] for i in job.partial.missing()]
    built = pipeline(options)
    built | beam.Create(missing) | beam.Reshuffle() | beam.ParDo(_MakePart(job))
    try:
        built.run().wait_until_finish()
    except (UserError, ImportError, OSError, RuntimeError, NotImplementedError) as error:
        if _NOT_SEEN in str(error):
            raise UserError(f"{job.partial.folder} {_NOT_SEEN}") from error
        if failed := job.partial.failures():
            raise UserError(failed[0]) from error
        if job.partial.any_done() or not _lacks_runner(error):
            raise  # with its traceback: the pipeline failed while running; finished parts stay
        raise _refused(options, str(error)) from error
    if failed := job.partial.failures():
        more = f" ({len(failed) - 1} more parts failed)" if len(failed) > 1 else ""
        raise DataError(f"{failed[0]}{more}")


def _refused(options: str, why: str) -> UserError:
    return UserError(f"--beam_pipeline_options={options}: {' '.join(why.split())[:500]}")


def _lacks_runner(error: Exception) -> bool:
    """Returns True if the runner's program is missing, which some notice only when they start."""
    message = str(error).lower()
    if isinstance(error, (ImportError, NotImplementedError)):
        return True
    return any(word in message for word in ("job server", "java", "prism bin"))


class _MakePart(beam.DoFn):
    """Writes one part to the target."""

    def __init__(self, job: Preparation):
        corpus = job.corpus
        self._arguments = corpus.config, job.partial, corpus.skip_broken
        self._tokenizer_json = job.tokenizer.to_json()
        self._code = preparation.code()

    def setup(self) -> None:
        self._tokenizer = tokenizer_lib.from_json(
            self._tokenizer_json, "the launcher's tokenizer", threads=1
        )

    def process(self, part: Part) -> Sequence[Any]:
        config, partial, skip_broken = self._arguments
        if partial_dataset_lib.read_plan(partial.folder) is None:
            raise UserError(f"{partial.folder} {_NOT_SEEN}")
        try:
            if preparation.code() != self._code:
                raise DataError(
                    "a Beam worker has other code or libraries than the launcher: install the same "
                    "kvjax on both, with constraints-beam.txt"
                )
            pool.make_part(config, part, self._tokenizer, partial, skip_broken=skip_broken)
        except UserError as error:
            partial.fail(part.index, str(error))
            if not isinstance(error, DataError):
                raise  # a full disk or a network failure: Beam retries
        return ()
