"""Apache Beam: its packages fit ours, and a pipeline writes the same bytes as one process.

Where Beam is not installed, `stand_in_beam` replaces it.
"""

import dataclasses
import importlib.util
import pathlib
import sys

import pytest

from kvjax.data import pool, preparation, prepare
from kvjax.foundation.errors import DataError, UserError
from tests.data import stand_in_beam
from tests.data.corpora import begin_preparation, files


@pytest.fixture(autouse=True)
def beam_or_a_stand_in(monkeypatch):
    if importlib.util.find_spec("apache_beam") is None:
        for name, module in stand_in_beam.modules().items():
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.beam
def test_what_is_installed_fits_together():
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.testing.util import assert_that, equal_to
    from array_record.python import array_record_module
    import grain
    import jax
    import jax.numpy as jnp
    import pyarrow.parquet
    import tensorflow_datasets as tfds

    assert array_record_module.ArrayRecordWriter and grain.MapDataset and tfds.core.DatasetInfo
    assert pyarrow.parquet.ParquetFile and jax.device_count()
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
        numbers = pipeline | beam.Create(range(10)) | beam.Map(lambda n: int(jnp.sum(n * 2)))
        assert_that(numbers | beam.CombineGlobally(sum), equal_to([90]))


RUNNER = "runner=FnApiRunner,direct_running_mode=multi_processing,direct_num_workers=2"


@pytest.fixture
def config(config):
    """A few parts of three files."""
    for path in pathlib.Path(config.source).iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:14]))
    return dataclasses.replace(config, vocab_size=280)


def test_a_pipeline_writes_the_same_bytes(config, expected):
    assert files(prepare.prepare(config, beam_options=RUNNER)) == expected


def test_it_goes_on_with_what_is_missing(config, expected, monkeypatch):
    job = begin_preparation(config)
    for part in job.corpus.parts[3:]:
        pool.make_part(config, part, job.tokenizer, job.partial, skip_broken=False)
    done = pathlib.Path(job.partial.folder) / "done"
    before = {path.name: path.stat().st_mtime_ns for path in done.iterdir()}
    from kvjax.data import beam

    beam.make(job, "runner=FnApiRunner")
    after = {path.name: path.stat().st_mtime_ns for path in done.iterdir()}
    assert len(after) == len(before) + 3 and after == after | before
    assert files(job.finish()) == expected


def test_what_a_worker_cannot_read_is_one_message(config):
    # Training a tokenizer would read all files.
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    path = pathlib.Path(config.source) / "1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:9], lines[9][:9], *lines[10:]]) + "\n")
    with pytest.raises(DataError, match=r"^\S+1\.jsonl, .*is not JSON.*\)\.$"):
        prepare.prepare(config, beam_options=RUNNER)


def test_a_target_that_workers_do_not_see_is_one_message(config):
    from kvjax.data import beam

    job = begin_preparation(config)
    (job.partial.folder / "plan.json").unlink()
    with pytest.raises(UserError, match=r"^\S+ is not visible to a Beam worker: --output must"):
        beam.make(job, "runner=FnApiRunner")


def test_what_parts_fail_for_is_one_message(config, monkeypatch):
    from kvjax.data import beam

    job = begin_preparation(config)
    others = len(job.corpus.parts) - 1
    for kind, more in ((UserError, ""), (DataError, rf" \({others} more parts failed\)")):

        def fails(*args, kind=kind, **kwargs):
            raise kind("x could not be read: Input/output error")

        monkeypatch.setattr(pool, "make_part", fails)
        with pytest.raises(kind, match=f"^x could not be read: Input/output error{more}$"):
            beam.make(job, "runner=FnApiRunner")
    assert set(job.partial.failures()) == {"x could not be read: Input/output error"}


def test_a_worker_with_other_code_makes_nothing(config, monkeypatch):
    job = begin_preparation(config)
    from kvjax.data import beam

    work = beam._MakePart(job)
    work.setup()
    assert work._tokenizer._threads == 1
    monkeypatch.setattr(preparation, "code", lambda: "other")
    work.process(job.corpus.parts[0])
    assert "other code or libraries than the launcher" in job.partial.failures()[0]
    assert 0 in job.partial.missing()


@pytest.mark.parametrize(
    "options, message",
    [
        ("runner=NoSuchRunner", "NoSuchRunner"),
        ("runner=DataflowRunner", "gcp|project|temp_location"),
        ("direct_num_workers=x", "direct_num_workers"),
    ],
)
def test_a_runner_that_cannot_be_is_told_before_any_work(config, options, message):
    with pytest.raises(UserError, match=f"^--beam_pipeline_options={options}: .*({message})"):
        prepare.prepare(config, beam_options=options)
    assert not list(config.root.glob("*"))


def test_a_runner_without_its_program_is_one_message(config):
    with pytest.raises(
        UserError, match="^--beam_pipeline_options=runner=FlinkRunner: .*(job|java)"
    ):
        prepare.prepare(config, beam_options="runner=FlinkRunner")
