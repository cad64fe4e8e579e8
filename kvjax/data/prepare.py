"""Turns text into packed rows, once: `python -m kvjax.data.prepare --source=... --vocab_size=...`.

The corpus is split into parts, which worker processes tokenize in parallel. The documents of a part
that are in one split (training or validation), each with BOS before it, form one stream of tokens.
Row i holds tokens i T to i T + T of the stream, so that consecutive rows share one token and every
token but the first is a target exactly once. Training drops the tokens that do not fill a part's
last row; validation pads that row with BOS, whose byte count is 0.

A killed preparation resumes when the same command is run again. --plan prints the expected time and
disk space beforehand. A source `tfds:NAME` that is not prepared as ArrayRecord is first built or
converted in the folder TFDS_DATA_DIR (~/tensorflow_datasets if it is not set); --build_only stops
after that.
"""

import argparse
import dataclasses
import json
import os

from etils import epath

from kvjax.data import (
    config as config_lib,
    folders,
    manifest,
    preparation,
    preparation_estimate,
    tfds_sets,
)
from kvjax.foundation import command_line, extras, progress, runtime
from kvjax.foundation.config_keys import keys
from kvjax.foundation.errors import DataError, UserError, warn
from kvjax.foundation.files import in_bucket
from kvjax.foundation.output import Output, Table


def prepare(
    config: config_lib.DataConfig,
    *,
    workers: int = 0,
    skip_broken: bool = False,
    beam_options: str = "",
    hours: float | None = None,
    shown: bool = True,
) -> epath.Path:
    """Returns the folder of the data set of `config`; prepares it if it does not exist yet.

    The folder holds `dataset.json` (the manifest), `tokenizer.json` and `packed_rows/` (in TFDS's
    format for ArrayRecord). Concurrent preparations write the same bytes.

    Args:
      workers: number of processes that tokenize; 0: one per core.
      skip_broken: skip lines, row groups and files that cannot be read, and list them.
      beam_options: comma-separated options of an Apache Beam pipeline; "": no Beam.
      hours: most hours that the preparation may take, by estimate; None: no limit.
      shown: print progress to stderr if it takes seconds.

    Raises:
      FileNotFoundError: a source or tokenizer does not exist.
      ValueError: a source cannot be read, a split is empty, or there is too little text for the
        vocabulary or for one row; the message names the file and the value.
      UserError: the preparation would take too long, or more disk space than is free.
    """
    if config_lib.is_prepared(config.source):
        return prepared_folder(config)
    if config.source == config_lib.MIXTURE:
        raise DataError(
            f"config.data.source = {config.source!r}: conversations are prepared by the run that "
            "trains on them: python -m kvjax.main --config=configs/mid.py:lrkv_128m"
        )
    if beam_options:
        extras.require("--beam_pipeline_options", "apache_beam")
    runtime.quiet_libraries()
    corpus = preparation.inspect_sources(config, skip_broken=skip_broken, shown=shown)
    if not corpus.parts:
        return corpus.path
    if beam_options:
        from kvjax.data import beam

        beam.pipeline(beam_options)  # raises for bad options before anything is written
    if not (beam_options and in_bucket(corpus.path)):
        limit = None if beam_options else hours
        preparation_estimate.check(corpus, workers or runtime.cores(), limit, shown=shown)
    try:
        job = preparation.begin(corpus, shown=shown)
        if beam_options:
            beam.make(job, beam_options)
        else:
            job.make(workers=workers, shown=shown)
        return job.finish()
    except Exception:
        # Another process may have been first, with the same content.
        if folders.is_whole(corpus.path / manifest.MANIFEST, manifest.read):
            return corpus.path
        raise


def build_tfds(config: config_lib.DataConfig) -> list[str]:
    """Builds the TFDS data sets among a config's sources; returns their names."""
    runtime.quiet_libraries()
    sources = [*config_lib.split_source(config.source)]
    sources += config_lib.split_source(config.validation_source)
    names = [tfds_sets.split_name(s)[0] for s in sources if s.startswith(tfds_sets.PREFIX)]
    for name in names:
        tfds_sets.build(name)
    return names


def prepared_folder(config: config_lib.DataConfig) -> epath.Path:
    """Returns the folder that a `prepared:` source names."""
    return runtime.path("config.data.source", config.source.removeprefix(config_lib.PREPARED))


def _parser() -> command_line.Parser:
    """Returns a parser with one option per key of DataConfig, and options of the preparation."""
    parser = command_line.Parser(__doc__)
    for key in keys(config_lib.DataConfig):
        name = config_lib.FLAG_NAMES.get(key.name, key.name)
        default = getattr(config_lib.DataConfig, key.name)
        text = f"{key.meaning} ({default!r})".replace("%", "%%")
        parser.add_argument(
            f"--{name}", dest=key.name, type=type(default), default=default, help=text
        )
    add = parser.add_argument_group("preparation").add_argument
    add("--workers", type=int, default=0, help="processes that tokenize (one per core)")
    add("--skip_broken", action="store_true", help="skip and list records that cannot be read")
    add("--build_only", action="store_true", help="build the sources tfds:NAME, and stop")
    add("--plan", action="store_true", help="estimate time and disk space, and prepare nothing")
    add("--beam_pipeline_options", default="", help="tokenize with Apache Beam; comma-separated")
    parser.add_output()
    return parser


def _print_plan(config: config_lib.DataConfig, options: argparse.Namespace) -> None:
    out, workers = Output(options), options.workers or runtime.cores()
    if config_lib.is_prepared(config.source):
        path, corpus = prepared_folder(config), None
        manifest.read(path)
    else:
        corpus = preparation.inspect_sources(config, skip_broken=options.skip_broken)
        path = corpus.path
    if corpus is None or not corpus.parts:
        out.say(f"Already prepared: {os.fspath(path)}")
        out.result({"folder": os.fspath(path)})
        return
    estimate = preparation_estimate.estimate(corpus, workers)
    size, seconds = progress.size, estimate.seconds(workers)
    per_byte = estimate.reading + estimate.encoding + estimate.writing
    rows = [
        ("parts", f"{estimate.parts:,}"),
        ("sources", size(estimate.source_bytes)),
        ("text", size(estimate.text_bytes)),
        ("tokens", progress.count(estimate.tokens)),
        ("rate per core", f"{size(estimate.rate)}/s"),
        ("of that, reading", f"{100 * estimate.reading / per_byte:.0f} %"),
        ("of that, encoding", f"{100 * estimate.encoding / per_byte:.0f} %"),
        ("of that, writing", f"{100 * estimate.writing / per_byte:.0f} %"),
        ("processes", f"{workers}"),
        ("time", progress.duration(seconds)),
    ]
    needs = preparation_estimate.room(corpus, estimate, workers)
    for folder, needed, free in needs:
        known = size(free) if free < float("inf") else "not known"
        rows.append((f"space in {folder}", f"{size(needed)} ({known} free)"))
    notes = []
    if estimate.vocab_size != config.vocab_size and config.tokenizer == "bpe":
        notes.append(f"Tokens are counted with a vocabulary of {estimate.vocab_size:,} tokens.")
    names = [name for sources in corpus.sources.values() for name, _ in sources]
    if any(map(in_bucket, [path, *names])):
        notes.append("Network time is not included.")
    out.show(Table(f"To prepare {config.source}, from a sample:", ("", "about"), rows, notes))
    room = [
        dict(folder=folder, needed=needed, free=free if free < float("inf") else None)
        for folder, needed, free in needs
    ]
    result = dataclasses.asdict(estimate) | dict(workers=workers, seconds=seconds)
    out.result(result | dict(folder=os.fspath(path), room=room))


def _config(options: argparse.Namespace) -> config_lib.DataConfig:
    names = [key.name for key in keys(config_lib.DataConfig)]
    return config_lib.DataConfig(**{name: getattr(options, name) for name in names})


def main(arguments: list[str]) -> None:
    """Prepares the data set that the options describe; prints its folder and manifest."""
    options = _parser().parse(arguments)
    if options.workers < 0:
        raise UserError(f"--workers={options.workers}: must be at least 1, or 0 for every core")
    try:
        config = _config(options)
        if options.plan:
            _print_plan(config, options)
            return
        built = build_tfds(config)
        if options.build_only:
            if not built:
                raise UserError(f"--build_only: --source={config.source} names no tfds:NAME")
            Output(options).result({"folder": tfds_sets.folder(), "names": built})
            return
        path = prepare(
            config,
            workers=options.workers,
            skip_broken=options.skip_broken,
            beam_options=options.beam_pipeline_options,
        )
    except UserError as error:
        raise UserError(config_lib.as_options(str(error))) from error
    info = {k: v for k, v in manifest.read(path).items() if k not in manifest.INTEGRITY_KEYS}
    if left_out := info.get("left_out"):
        for text in left_out["first"]:
            warn(f"skipped: {config_lib.as_options(text)}")
    if options.json:
        Output(options).result(info | {"folder": os.fspath(path)})
    else:
        print(json.dumps(info, indent=2) + "\n" + os.fspath(path))


if __name__ == "__main__":
    command_line.run(main)
