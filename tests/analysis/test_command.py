"""`python -m kvjax.analysis`: files, requests to reports, user errors."""

import errno
import itertools
import json
import os
import re
import shutil
import time
import types

import numpy as np
import pytest

from kvjax.analysis import __main__ as command, reports, texts
from kvjax.analysis.page.section import Section
from kvjax.convert import model as model_lib
from kvjax.data import tokenizer
from kvjax.foundation import command_line, progress, provenance, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from tests.convert import comparison, workdirs

SHORT = f"--texts=license={ROOT / 'LICENSE'}"  # the embedded books are 400,000 characters
PLAIN = ("--lengths=8,16", "--out=out", SHORT)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The workdir of a model of three layers and four heads."""
    block, mechanism, _ = workdirs.MODELS["lrkv"]
    folder = tmp_path_factory.mktemp("analysis") / "small"
    return str(workdirs.write(folder, workdirs.config(block, mechanism)))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command with options; returns status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "start", lambda **_: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)
    return lambda *options: (command_line.status(command.main, list(options)), *capsys.readouterr())


@pytest.fixture
def made(monkeypatch):
    """Two reports that note their requests, by name."""
    requests = {}

    def report(name):
        def section(model, request):
            requests[name] = (model, request)
            data = {"layers": np.arange(2), "least": np.float32(0.5), "none": float("nan")}
            return Section(name, f"The {name}", "What came out.", [], [], data | {"pair": (1, 2)})

        return types.SimpleNamespace(check=lambda *_: None, section=section)

    modules = {name: report(name) for name in ("first", "second")}
    monkeypatch.setattr(reports, "NAMES", tuple(modules))
    monkeypatch.setattr(reports, "module", modules.__getitem__)
    return types.SimpleNamespace(modules=modules, requests=requests)


def _never(*_):
    raise AssertionError("work has begun")


def test_a_page_and_every_number(run, workdir, made, tmp_path):
    begun = time.monotonic()
    status, out, err = run(f"--workdir={workdir}", f"--beside={workdir}", *PLAIN, "--json")
    assert status == 0, err
    assert sorted(os.listdir(tmp_path / "out")) == ["report.html", "report.json"]
    html = (tmp_path / "out/report.html").read_text("utf-8")
    assert "<title>Attention in small</title>" in html
    assert html.index("The first") < html.index("The second")
    found = json.loads((tmp_path / "out/report.json").read_text("utf-8"), parse_constant=_never)
    assert list(found["reports"]) == ["first", "second"]
    data = dict(layers=[0, 1], least=0.5, none=None, pair=[1, 2])
    first = dict(title="The first", finding="", lead="What came out.", data=data)
    assert found["reports"]["first"] == first
    result, about = json.loads(out), found["about"]
    assert list(about.pop("Seconds")) == ["first", "second"] and about["Date"] in html
    parameters = 2 * 260 * 24 + 3 * (24 * (32 + 2 * 8 + 2 * 12 + 32) + 2 * 12 * 8 + 2 * 24 * 20)
    tokens = len((ROOT / "LICENSE").read_bytes())
    made_by = provenance.provenance("matplotlib", "scipy")
    known = dict(kind="grouped", num_heads=4, num_bases=1, rank=3, qk_norm="rms", rope="full")
    attention = about["Attention"]
    assert attention | known == attention
    assert not any(value in (False, "none", []) for value in attention.values())
    assert about == {
        "Model": "small, checkpoint of step 0",
        "Beside": "small",
        "Size": f"3 layers of width 24, {parameters:,} parameters, trained on 40 tokens at a time",
        "Attention": attention,
        "Texts": dict(license=f"{tokens:,} tokens"),
        "Lengths": "8, 16 tokens",
        "Command": made_by["command"],
        "Date": about["Date"],
        "Commit": made_by["commit"],
        "Machine": f"{made_by['machine']}; {made_by['devices']}",
        "Versions": {"python": made_by["python"]} | made_by["packages"],
    }
    assert result["bytes"] == {
        name: len((tmp_path / "out" / name).read_bytes()) for name in ("report.html", "report.json")
    }
    assert result["html"] == str(tmp_path / "out/report.html")
    assert "written: out/report.html" in err
    assert 0 < sum(result["seconds"].values()) < time.monotonic() - begun
    two = workdirs.grouped(4, 1, 3), workdirs.factored(2, 1, 5, 4)
    mixed = workdirs.Made(workdirs.config("nanochat", [*two, two[0]]))
    several = "layers of several kinds: LRKV, rank 3; low rank, keys 5, values 4"
    assert command._attention(mixed) == several
    assert command._snapshots(None, mixed) == []  # it is no run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm3", "gemma2", "gemma3", "qwen2_some_windows"])
def test_layers_of_several_kinds_are_measured(run, tmp_path, name):
    letters = np.random.default_rng(0).choice(list("abcdefgh"), 400)
    (tmp_path / "letters").write_text("".join(letters))
    options = ("--lengths=8,16", "--out=out", "--texts=letters=letters")
    status, _, err = run(f"--model={comparison.PUBLISHED / name}", *options)
    assert status == 0, err
    found = json.loads((tmp_path / "out/report.json").read_text("utf-8"))["reports"]
    assert {"behaviour", "compression", "diversity", "logits"} <= found.keys()
    assert ("before their soft cap of 1.5" in found["logits"]["lead"]) == (name == "gemma2")


def test_reports_get_texts_and_lengths(run, workdir, made):
    status, _, err = run(f"--workdir={workdir}", "--lengths=16,8,16", "--out=out")
    assert status == 0, err
    model, request = made.requests["first"]
    assert isinstance(model, model_lib.TrainedModel) and model.name == "small"
    assert request.lengths == (8, 16) and request.beside is None and not request.snapshots
    assert list(request.texts) == ["Shakespeare", "King James Bible"]
    ids = request.texts["King James Bible"]
    assert ids.dtype == np.int32 and ids.ndim == 1 and len(ids) > 190_000
    words = tokenizer.from_json(model.tokenizer_json, "its own").decode(ids[-300:])
    assert "The grace of our Lord Jesus Christ be with you all. Amen." in words


def test_reports_are_chosen_and_beside_is_opened(run, workdir, made):
    options = (f"--model={workdir}", f"--beside={workdir}", "--reports=second", *PLAIN)
    status, _, err = run(*options)
    assert status == 0, err
    assert list(made.requests) == ["second"] and made.requests["second"][1].beside.name == "small"


def test_defaults(run, workdir, made, tmp_path):
    """Takes lengths up to the model's context, and a folder of its name."""
    status, out, err = run(f"--workdir={workdir}", SHORT)
    assert status == 0, err
    assert made.requests["first"][1].lengths == (workdirs.CONTEXT,)
    assert (tmp_path / "runs/analysis/small/report.html").exists()
    assert "written: runs/analysis/small/report.html" in out
    known = {63: (63,), 64: (64,), 300: (64, 256), 1024: (64, 256, 1024)}
    for context, lengths in known.items():
        assert command._default_lengths(types.SimpleNamespace(context=context)) == lengths
    assert command._file_name("a b/../c") == "a_b_.._c" and command._file_name("..") == "model"


def test_an_earlier_report_is_kept_if_a_report_fails(run, workdir, made, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("report.html", "report.json", "notes.txt"):
        (tmp_path / "out" / name).write_text("before")

    def broken(model, request):
        raise UserError("layer 2: weights of keys are not finite, of heads [1]")

    whole, made.modules["second"].section = made.modules["second"].section, broken
    status, _, err = run(f"--workdir={workdir}", *PLAIN)
    assert status == 2 and err == "kvjax: layer 2: weights of keys are not finite, of heads [1]\n"
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        ("report.html", "report.json", "notes.txt"), "before"
    )
    made.modules["second"].section = whole
    assert run(f"--workdir={workdir}", *PLAIN)[0] == 0
    assert (tmp_path / "out/report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert (tmp_path / "out/notes.txt").read_text() == "before"


def test_a_report_that_refuses_the_model(run, workdir, made):
    """Is left out with a message, or refused if it was requested by name."""

    def check(model, request):
        raise UserError(f"{model.name} has one head")

    made.modules["second"].check = check
    status, _, err = run(f"--workdir={workdir}", *PLAIN)
    assert status == 0 and "without second: small has one head" in err
    assert list(made.requests) == ["first"]
    made.modules["first"].section = _never
    status, _, err = run(f"--workdir={workdir}", "--reports=second,first", *PLAIN)
    assert status == 2 and err == "kvjax: --reports=second: small has one head\n"
    made.modules["first"].check = check
    status, _, err = run(f"--workdir={workdir}", *PLAIN)
    assert status == 2 and err.endswith("none of the reports first, second applies to small\n")


def test_bad_options_are_refused_before_any_work(run, workdir, made, tmp_path):
    (tmp_path / "taken/report.html").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("a few")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "rows.jsonl").write_text('{"words": "a"}\n')
    made.modules["first"].section = made.modules["second"].section = _never
    for options, said in {
        (): "--workdir and --model: neither is given; give one of them, as runs/lrkv_tiny",
        ("--model=x",): "--workdir and --model: both are given",
        ("--reports=frist",): "'frist' is none of first, second; did you mean 'first'?",
        ("--heads=3",): "--heads=3: '3' is not a head: give LAYER.HEAD, such as 3.1",
        ("--heads=" + ",".join(["1.1"] * 17),): "--heads: 17 heads: must be at most 16",
        ("--heads=1.1",): "--heads=1.1: needs behaviour among the --reports",
        ("--lengths=1",): "--lengths '1': must be integers of 2 or more",
        ("--lengths=2000000",): "--lengths = 2000000: rope positions reach 1048576 tokens in small",
        (
            "--lengths=500000",
            "--texts=embedded",
        ): "'Shakespeare' has 199,990 tokens of small, and the longest of "
        "--lengths is 500,000: give a longer text, or shorter --lengths",
        ("--texts=a=short.txt", "--lengths=9,4"): "'a' has 5 tokens of small, and the longest of "
        "--lengths is 9",
        ("--texts=a=latin.txt",): "'a': {here}/latin.txt is not UTF-8: unexpected end of data at "
        "byte 3. Convert it",
        ("--texts=a=rows.jsonl",): "'a': {here}/rows.jsonl, line 1 has no key 'text'; it has "
        "['words']. Set --text_key to the key of the text.\n",
        ("--texts=a=missing.txt",): "--texts=a=missing.txt: no such file: give a file of text",
        ("--texts=a=/dev/null",): "--texts = '/dev/null': must be a file or folder",
        ("--texts=a=folder",): "--texts=a=folder: no such file: give a file of text",
        ("--texts=short.txt",): "'short.txt' is no text: give NAME=FILE",
        ("--texts=a\x01=short.txt",): "'a\\x01' cannot be printed",
        ("--texts=a=short.txt,a=short.txt",): "'a' is given twice: give another name",
        ("--beside=missing",): "--beside = 'missing': there is no such folder or file",
        ("--out=short.txt",): "--out = 'short.txt': must be a folder",
        ("--out=taken",): "--out = 'taken': report.html is a folder",
        ("--step=3",): "unknown option --step",
    }.items():
        given = [] if not options else [f"--workdir={workdir}", SHORT]
        status, out, err = run(*given, *options)
        assert status == 2 and out == "", options
        assert said.format(here=tmp_path) in err and err.count("kvjax: ") == 1, err
    assert not (tmp_path / "runs").exists()


def test_heads_that_do_not_exist_are_refused():
    model = workdirs.Made(workdirs.config("nanochat", workdirs.grouped(4, 1, 3)))
    command._check_heads(model, ((0, 0), (2, 3)))
    with pytest.raises(UserError, match="--heads: 3.0 does not exist: layers of made are 0 to 2"):
        command._check_heads(model, ((0, 0), (3, 0)))
    with pytest.raises(UserError, match="--heads: 1.4 does not exist: heads of layer 1 are 0 to 3"):
        command._check_heads(model, ((1, 4),))
    assert command._heads("3.1,0.0,3.1") == ((3, 1), (0, 0)) and command._heads("") == ()


def test_errors_of_models_name_the_option(run, workdir, made, tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for option, name in itertools.product(
        ("workdir", "model", "beside"), ("notes.txt", "missing", "\udcff")
    ):
        others = [f"--workdir={workdir}"] if option == "beside" else []
        status, _, err = run(*others, f"--{option}={name}", *PLAIN)
        assert status == 2 and f"--{option}" in err and "--source" not in err


def test_weights_that_are_not_finite_are_refused_before_any_work(run, made, tmp_path):
    block, mechanism, _ = workdirs.MODELS["lrkv"]
    made.modules["first"].section = _never
    said = "values that are not finite"
    for i, (path, expected) in enumerate(
        {
            ("segments", 0, "attention", "mechanism", "base_key"): (
                f"layer 2 of broken0: .*base_key .*{said}"
            ),
            ("segments", 0, "mlp", "up"): f"layer 2 of broken1: .*mlp.up .*{said}",
            ("head",): f"broken2: .*head .*{said}",
        }.items()
    ):
        model = workdirs.Made(workdirs.config(block, mechanism))
        model.weights[path] = model.weights[path].copy()
        model.weights[path][2, ..., 0] = np.nan
        workdirs.into_workdir.write(model, command.epath.Path(tmp_path / f"broken{i}"), {})
        status, _, err = run(f"--workdir=broken{i}", "--lengths=8", SHORT)
        assert status == 2 and re.match(f"kvjax: {expected}", err), err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "damaged, named",
    [("checkpoints", "small"), ("snapshots", "the snapshot of step 0 of small")],
)
def test_a_damaged_checkpoint_is_refused_before_any_work(
    run, workdir, made, tmp_path, damaged, named
):
    """Reads all weights, of snapshots too, before any report checks the model."""
    shutil.copytree(workdir, tmp_path / "small")
    shutil.copytree(tmp_path / "small/checkpoints", tmp_path / "small/snapshots")
    files = [path for path in (tmp_path / "small" / damaged).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = np.frombuffer(largest.read_bytes(), np.uint8).copy()
    content[::100] ^= 16
    largest.write_bytes(content.tobytes())
    made.modules["first"].section = made.modules["first"].check = _never
    status, _, err = run("--workdir=small", *PLAIN)
    assert status == 2 and err.count("kvjax: ") == 1
    # Which array it is that lies in the damaged file, each save decides anew.
    assert re.match(rf"kvjax: (layer \d of )?{named}: ", err) and "cannot be read" in err
    assert "restore its files" in err
    assert not (tmp_path / "out").exists()


def test_files_are_written_before_the_output(run, workdir, made, tmp_path, monkeypatch):
    def say(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Output, "say", say)
    status, _, err = run(f"--workdir={workdir}", *PLAIN)
    assert status == 2 and "No space left on device" in err
    assert sorted(os.listdir(tmp_path / "out")) == ["report.html", "report.json"]


def test_texts_are_tokens_of_their_files(workdir, tmp_path):
    """Concatenates documents, and keeps a long text's first tokens."""
    (tmp_path / "a.txt").write_text("\ufeffone\ftwo", "utf-8")
    (tmp_path / "b.jsonl").write_text('{"said": "three"}\n{"said": null}\n{"said": "four"}\n')
    (tmp_path / "c").write_text("five\n" * 70_000)
    option = ",".join(f"{name}={tmp_path / name}" for name in ("a.txt", "b.jsonl", "c"))
    found = texts.tokens(texts.sources(option, "said"), model_lib.open(workdir), 4)
    assert bytes(found["a.txt"].tolist()) == b"onetwo"
    assert bytes(found["b.jsonl"].tolist()) == b"threefour"
    assert bytes(found["c"].tolist()) == (b"five\n" * 70_000)[: texts.MOST_TOKENS]
    assert len(found["c"]) == texts.MOST_TOKENS == 262_144
    broken = types.SimpleNamespace(name="x", pieces=lambda *_: iter([Broken()]))
    with pytest.raises(UserError, match="--texts: 'x': cannot be read: it broke"):
        texts.tokens(dict(x=broken), model_lib.open(workdir), 4)


class Broken:
    """A piece of text that cannot be read."""

    @property
    def text(self):
        raise OSError("it broke")


@pytest.mark.slow
def test_a_real_report(run, workdir, tmp_path):
    status, _, err = run(f"--workdir={workdir}", "--reports=diversity", *PLAIN)
    assert status == 0, err
    html = (tmp_path / "out/report.html").read_text("utf-8")
    assert html.count('role="img"') > 3 and html.count("<table") > 1
    assert len(html) < 1e6


def test_help_names_the_reports(run):
    status, out, err = run("--help")
    assert status == 0 and "diversity" in out + err and "--lengths" in out + err
