"""Malformed configs, workdirs, prompts and texts."""

from collections.abc import Callable, Iterator

from kvjax.foundation.checkout import ROOT
from tests.fuzz.case import Case
from tests.fuzz.commands import (
    FILE,
    FOLDER,
    LONG,
    MISSING,
    NO_UTF8,
    RUN,
    SNOWMAN,
    SURROGATE,
    WORKING,
    config_file,
)


def file_cases() -> Iterator[Case]:
    """Yields malformed configs, workdirs, prompts and texts."""
    for command in ("kvjax.main", "kvjax.costs", "kvjax.aot"):
        working, _ = WORKING[command]

        def case(*given, c=command, w=working, **known):
            return Case(command=c, arguments=(*w, *given), **dict(status=(2,)) | known)

        files = (
            "binary",
            "raises",
            "ends",
            "wrong",
            "none",
            "a_dict",
            "late",
            "prompts",
            "keyless",
        )
        for name in files:
            yield case(f"--config=../shared/{name}.py", message=(f"{name}.py", "missing", "'data'"))
        for name in ("", ".", "configs", FOLDER, FILE, MISSING, "lrkv_small", "/dev/null"):
            yield case(f"--config={name}", message=("config",))
        for name in (SNOWMAN, NO_UTF8, SURROGATE, "a\x01b", f"{ROOT}/configs", "lrkv_tyni.py"):
            yield case(f"--config={name}", message=("config",))
        for name in ("ranks.py", "ranks.py:", "ranks.py:x", "ranks/lrkv_r16_128m.py", "x.py:x"):
            yield case(f"--config={ROOT}/configs/{name}", message=("config", name))
        for name in (f"ranks.py:{SNOWMAN}", f"ranks.py:{SURROGATE}", "lrkv_tiny.py:x"):
            yield case(f"--config={name}", message=("config",))
        yield case("--config", message=("config",))
        yield case("--config", MISSING, message=("missing",))
        yield case(config_file("lrkv_tiny"), config_file("x"), message=("config",))
    yield from _workdir_cases()
    yield from _prompt_cases()
    yield from _text_cases()
    yield from _analysis_cases()


_NO_RECORDS = ("\xff\xfe\x00\n", "[]\n", "{}\n", '{"step": "x"}\n', "null\n", "")
_NO_JSON = (*_NO_RECORDS, "/", None, '{"train": ' * 100_000)


def _workdir_cases() -> Iterator[Case]:
    def main(*given, **known):
        return Case(
            command="kvjax.main",
            arguments=(config_file("lrkv_tiny"), *RUN[1:], *given),
            **dict(message=("workdir",)) | known,
        )

    def text(workdir, **known):
        return Case(
            command="kvjax.generate", arguments=(f"--workdir={workdir}", "--prompt=a"), **known
        )

    schemes = ("gs://b/x", "s3://b/x", "hdfs://x", "no://x", "://", "http://localhost:1/x")
    for workdir in ("", FILE, f"{FILE}/x", "/proc/x", "/dev/null", "/dev/null/x", *schemes, LONG):
        where = tuple(filter(None, (workdir[:20], workdir.partition("://")[0], "workdir")))
        if workdir:
            yield main(f"--workdir={workdir}", message=where, status=(2,))
        yield text(workdir, message=where, status=(2,))
    for path in (FOLDER, SNOWMAN, "a/b/c", "~", f"{FOLDER}/", "gs:/x"):
        yield text(path, message=("workdir",), status=(2,))
    trained = dict(scene="trained")

    def resume(**known):
        return Case(
            command="kvjax.main",
            arguments=("--config=same.py", "--workdir=run", "--config.train.sample_tokens=0"),
            **trained | dict(talks=True) | known,
        )

    same_config = ("same.py", _SAME)
    yield resume(edits=(same_config,), status=(0,), prints="validation")
    for name in ("metrics.jsonl", "timing.jsonl", "config.json", "dataset.json", "tokenizer.json"):
        for content in (*_NO_RECORDS, "/", None):
            message = (name, "holds another run")
            yield resume(edits=(same_config, (f"run/{name}", content)), message=message)
        torn = (f"run/{name}", '{"step": 1}\n{"st')
        yield resume(edits=(same_config, torn), message=(name,), loses=(f"case/{torn[0]}",))
        if name in ("config.json", "tokenizer.json"):
            for content in _NO_JSON:
                edits = ((f"run/{name}", content),)
                yield text("run", edits=edits, message=(name,), status=(2,), **trained)
    yield text("run", edits=(("run/checkpoints", None),), message=("run",), status=(2,), **trained)
    yield text("run", edits=(("run/checkpoints", "x"),), message=("run",), status=(2,), **trained)
    yield main("--workdir=run", status=(2,), message=("run",), **trained)


_SAME = """
from tests import runs

def get_config():
    config = runs.small_config("../shared/text.txt", "../shared/data", num_steps=2, eval_rows=8)
    config.data.update(tokenizer="byte", vocab_size=257, sequence_length=32)
    config.train.update(batch_size=2, checkpoint_every=1)
    return config
"""


def _prompt_cases() -> Iterator[Case]:
    def case(*given, **known):
        return Case(
            command="kvjax.generate",
            arguments=("--workdir=../shared/trained", *given),
            **dict(status=(2,)) | known,
        )

    yield case(message=("prompt",))
    for file in ("", FOLDER, MISSING, "../shared/empty.txt", "../shared/latin.txt", "no://x", LONG):
        yield case(f"--prompt_file={file}", message=("prompt",))
    for content in ("", "\n", "a\n\nb\n", "\xff\xfe", "a\0b\n"):
        yield case(
            "--prompt_file=-", stdin=content, message=("standard input", "line"), status=(0, 2)
        )
    yield case("--prompt_file=-", stdin="a\nb\n", status=(0,), prints="would")
    yield case("--prompt=a", "--num_tokens=0", message=("num_tokens",))
    yield case("--prompt=a", "--top_p=0", message=("top_p",))
    yield case("--prompt=a", "--temperature=nan", message=("temperature",))
    yield case("--prompt=a", "--stop_token=257", message=("stop", "257"))
    yield case("--prompt=a", "--step=3", message=("step",))
    yield case("--prompt=a", "--chips=3000", message=("chips",))
    yield case("--prompt=abcdefgh", "--capacity=2", message=("capacity",))
    yield case("--prompt=a", "--seed=4294967296", message=("seed",))
    yield case("--prompt=a", "--dtype=float16", message=("dtype",))
    yield case("--prompt=a", "--implementation=tpu", message=("implementation",))


def _text_cases() -> Iterator[Case]:
    """Yields texts for `kvjax.data.prepare`, and damaged prepared data."""

    def case(*given, **known):
        return Case(
            command="kvjax.data.prepare",
            arguments=("--tokenizer=byte", "--output=out", "--sequence_length=32", *given),
            **dict(status=(2,)) | known,
        )

    files = ("empty.txt", "latin.txt", "deep.jsonl", "binary.py", "a_file", "data", "missing.txt")
    for name in files:
        yield case(f"--source=../shared/{name}", message=(name, "source"))
    for name in (
        ",",
        " ",
        "*.nothing",
        "no://x",
        "gs://b/x.txt",
        "tfds:",
        "tfds:no_such",
    ):
        yield case(f"--source={name}", message=(name, "source"))
    yield case("--source=tfds:#", message=("tfds: cannot be opened",))  # "#" begins a split
    text = "--source=../shared/text.txt"
    yield case("--source=../shared/marked.txt", status=(0,), prints="datasets")
    yield case(text, f"--validation_source={MISSING}.txt", message=("validation_source",))
    yield case(text, "--sequence_length=99999999999", message=("sequence_length",))
    yield case(text, "--sequence_length=1000000", message=("sequence_length",))
    yield case(text, f"--output={FILE}", message=(FILE, "output"))
    yield case(text, "--output=/proc/x", message=("/proc/x", "output"))
    yield case(text, "--output=gs://b/x", message=("gs://", "output"))
    yield case(text, "--tokenizer=../shared/missing.json", message=("missing.json", "tokenizer"))
    yield case(text, "--tokenizer=bpe", "--vocab_size=100000", message=("vocab_size",))

    def main(*given, **known):
        return Case(
            command="kvjax.main",
            arguments=(config_file("lrkv_tiny"), *RUN, "--config.data.source=prepared:p", *given),
            **dict(message=("p",), status=(2,)) | known,
        )

    for content in (*_NO_RECORDS, "[" * 100_000, "/", None):
        yield main(edits=(("p/dataset.json", content),))


def _analysis_cases() -> Iterator[Case]:
    """Yields malformed models, texts and folders of reports."""

    def case(*given, **known):
        return Case(
            command="kvjax.analysis", arguments=("--out=out", *given), **dict(status=(2,)) | known
        )

    trained, run = "--workdir=../shared/trained", dict(scene="trained")
    works = dict(status=(0,), prints="would analyse")
    yield case(message=("--workdir and --model",))
    yield case("--model=../shared/trained", "--beside=../shared/trained", **works)
    for source in ("", ".", "../shared/data", "../shared/trained/checkpoints", f"{FILE}/x"):
        yield case(f"--model={source}", message=("--model",))
    for source in (FOLDER, FILE, MISSING, LONG, NO_UTF8, "no://x", "gs://b/x", "/dev/null"):
        yield case(f"--model={source}", message=("--model",))
    for name in ("config.json", "tokenizer.json"):
        for content in _NO_JSON:
            yield case("--workdir=run", edits=((f"run/{name}", content),), message=(name,), **run)
        yield case(trained, "--beside=run", edits=((f"run/{name}", None),), message=(name,), **run)
    state = "checkpoints/2/state"
    for path in ("checkpoints", state, f"{state}/manifest.ocdbt", f"{state}/ocdbt.process_0/d"):
        for content in ("x", "/"):
            edits = ((f"run/{path}", content),)
            yield case("--workdir=run", edits=edits, message=("run",), **run)
            yield case(trained, "--beside=run", edits=edits, message=("--beside",), **run)
    for path in ("snapshots", "snapshots/1", "snapshots/1/state/manifest.ocdbt"):
        for content in ("x", "/"):
            edits = ((f"run/{path}", content),)
            yield case("--workdir=run", edits=edits, message=("snapshots/1",), status=(0, 2), **run)
    yield from _texts_of_analysis(lambda texts, **known: case(trained, f"--texts={texts}", **known))
    for lengths in ("0", "-1", "1", "2.5", "8,", "8;9", "1e3", "9" * 5000, "9" * 50, "99999999"):
        yield case(trained, f"--lengths={lengths}", message=("--lengths",))
    yield case(trained, "--lengths=9,2,9", **works)
    for reports in (",", "logits,", "Logits", "logits;diversity"):
        yield case(trained, f"--reports={reports}", message=("--reports",))
    for out in (f"{FILE}/x", "/proc", "/proc/x", "/dev/null/x", LONG, "gs://b/x", "no://x"):
        yield case(trained, f"--out={out}", message=("--out",))
    for name in ("report.html", "report.json"):
        yield case(trained, edits=((f"out/{name}", "/"),), message=("--out",))


def _texts_of_analysis(case: Callable[..., Case]) -> Iterator[Case]:
    """Yields texts that are missing, too short or malformed, and some that are valid."""
    for file in ("empty.txt", "latin.txt", "deep.jsonl", "binary.py", "data", "missing.txt"):
        yield case(f"a=../shared/{file}", message=(file, "'a'"))
    for text in ("a", "a=", "=b", ",", "embedded,", "embedded,embedded", "a=no://x", "a=gs://b/x"):
        yield case(text, message=("--texts",))
    for file in (LONG, NO_UTF8, "/dev/null", "/dev/stdin", "/dev/zero", "/proc/self/mem"):
        yield case(f"a={file}", message=("--texts",))
    for line in ("", "x", '{"words": "a"}', '{"text": 1}', "{}", '{"text": "\\ud800"}'):
        yield case("a=a.jsonl", edits=(("a.jsonl", f"{line}\n"),), message=("a.jsonl", "'a'"))
    for name in ("a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"):
        yield case(f"a={name}", edits=((name, "x" * 100),), message=(name,))
    works = dict(status=(0,), prints="would analyse")
    line = '{"text": "the words of a text"}\n'
    yield case("a=a.jsonl", edits=(("a.jsonl", line * 9),), **works)
    yield case("a=../shared/marked.txt,b=../shared/text.txt", **works)
