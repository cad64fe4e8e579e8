"""The command from options to summary.json, and its user errors."""

import datetime
import json
import shutil
import types

import numpy as np
import pytest

from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding.answers import Answer
from kvjax.evaluate import __main__ as evaluate, evaluation, summary
from kvjax.foundation import command_line, json_text, progress, runtime
from tests.conversation import workdirs
from tests.evaluate import oracles


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return workdirs.write(tmp_path_factory.mktemp("talking") / "run")


@pytest.fixture
def workdir(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def run(workdir, data, capsys, monkeypatch):
    """A function of flags: (exit status, standard output, standard error)."""
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)

    def command(*given, workdir=workdir):
        arguments = [f"--workdir={workdir}", f"--data={data}", "--num_tokens=8", *given]
        return command_line.status(evaluate.main, arguments), *capsys.readouterr()

    return command


@pytest.mark.slow
def test_all_five_tasks(run, workdir):
    status, out, err = run("--json", "--batch=4")
    assert status == 0, err
    result = json.loads(out)
    rows = {name: task["rows"] for name, task in result["tasks"].items()}
    assert rows.items() <= oracles.COUNTS.items() and len(rows) == 5
    assert result["options"]["sandbox"] and result["options"]["calculator"] == "nanochat"
    assert "combined" in result and "chat_core" in result
    written = json.loads((workdir / "evaluations" / "0" / "summary.json").read_text())
    written = json_text.without_checksum(written)
    assert written.pop("made_by")["command"] and written == result
    rows = (workdir / "evaluations" / "0" / "mmlu.jsonl").read_text().splitlines()
    assert [json.loads(row)["index"] for row in rows] == list(range(8))
    assert "mmlu" in err and "8 rows, the published set has 14,042" in err
    again = json.loads(run("--json", "--batch=4")[1])  # evaluates no row again
    assert not any("asked_now" in task for task in again["tasks"].values())


@pytest.mark.slow
def test_core(run, tmp_path):
    """Evaluates CORE of a model without a chat format."""
    plain = workdirs.write(tmp_path / "plain", tokenizer=tokenizer_lib.byte_tokenizer())
    status, out, err = run("--tasks=core", "--json", workdir=plain)
    assert status == 0, err
    result = json.loads(out)
    assert result["tasks"]["core_x"]["rows"] == 6 and "core" in result


class _Equal:
    """A model whose logits are all equal and whose answers are empty."""

    batch = 4

    def __init__(self, generator, tokenizer, dialogue, *, batch):
        self.tokenizer, self.dialogue, self.positions = tokenizer, dialogue, None

    def choices(self, prompts, candidates):
        return [np.zeros(len(each)) for each in candidates]

    def answers(self, prompts, **options):
        return [Answer() for _ in prompts]


TEMPLATE = "{{ bos_token }}{% for m in messages %}<|u|>{{ m.content }}<|e|>{% endfor %}"
DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
TOKENS = dict(bos_token="<|bos|>", eos_token="<|bos|>")


@pytest.fixture
def templated(run, monkeypatch, tmp_path):
    """Returns `run` for a model that has a chat template and answers at once, and its workdir."""
    tokenizer = tokenizer_lib.byte_tokenizer().with_specials(["<|u|>", "<|e|>"])
    made = workdirs.write(tmp_path / "templated", tokenizer=tokenizer, template=TEMPLATE)
    (made / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    monkeypatch.setattr(
        evaluate.trained, "load", lambda *a, **k: types.SimpleNamespace(model=0, compute=0)
    )
    monkeypatch.setattr(evaluate, "Generator", lambda *given: None)
    monkeypatch.setattr(evaluate, "CachedModel", _Equal)
    return lambda *given: run(*given, workdir=made), made


def _forget(folder, *keys):
    """Removes keys that earlier versions did not write from the rows' identities."""
    for path in folder.glob("*.json"):
        identity = json.loads(path.read_text())
        path.write_text(json.dumps({key: identity[key] for key in identity.keys() - set(keys)}))


def test_rows_of_another_template_or_end_token_are_refused(templated):
    """Rows of earlier versions are compared by prompt digest."""
    run, made = templated
    rows, template, tokens = (
        made / "evaluations/0",
        made / "chat_template.jinja",
        made / "tokenizer_config.json",
    )

    def run_all(*given):
        return run("--tasks=mmlu,gsm8k", "--json", *given)

    assert run_all("--limit=2")[0] == 0
    kept = {path: path.read_text() for path in rows.iterdir()}
    new = ("template", "day", "ends", "calculator")

    def refused(path, text, said, *forgotten):
        before = path.read_text()
        path.write_text(text)
        _forget(rows, *forgotten)
        status, _, err = run_all()
        assert status == 2 and said in err, err
        path.write_text(before)
        for path, text in kept.items():
            path.write_text(text)

    other = TEMPLATE.replace("<|u|>", "<|u|> ")
    refused(template, other, "saved rows of mmlu have template = '")
    refused(template, other, "row 0 of mmlu has prompt digest", *new)
    refused(tokens, json.dumps(TOKENS | dict(bos_token="")), "saved rows of mmlu have template")
    ended = json.dumps(TOKENS | dict(eos_token="<|u|>"))
    refused(tokens, ended, "saved rows of gsm8k have ends = [256, 258], but this command has [256")
    # Rows of earlier versions, in which the template's end token did not end answers.
    refused(tokens, json.dumps(TOKENS), "saved rows of gsm8k have ends = [256], but", *new)
    _forget(rows, *new)
    status, out, err = run("--tasks=mmlu", "--json")
    assert status == 0 and json.loads(out)["tasks"]["mmlu"]["rows"] == 8, err


def test_summary_drops_tasks_of_other_templates():
    done = dict(rows=1, of=2, right=1)
    tasks = dict(mmlu=done | dict(template="a"), gsm8k=done | dict(template="b"), core_x=done)
    for template, kept in {"b": ["gsm8k", "core_x"], "": list(tasks)}.items():
        about = dict(model={}, data={}, options=dict(template=template))
        assert list(summary.make({}, [], about, dict(model={}, tasks=tasks))["tasks"]) == kept


def test_prompts_keep_the_day_of_the_first_rows(templated, monkeypatch):
    """A template that writes the day, as Llama 3.2's, gets the day of the first rows."""
    run, made = templated
    (made / "chat_template.jinja").write_text(DATED)
    with monkeypatch.context() as patch:
        day = types.SimpleNamespace(today=lambda: datetime.date(2024, 7, 26))
        patch.setattr(evaluate, "datetime", types.SimpleNamespace(date=day))
        assert run("--tasks=mmlu", "--limit=2")[0] == 0
    status, out, err = run("--tasks=mmlu,arc_easy", "--json")
    assert status == 0 and json.loads(out)["tasks"]["mmlu"]["rows"] == 8, err
    days = [
        json.loads((made / f"evaluations/0/{n}.json").read_text())["day"]
        for n in ("mmlu", "arc_easy")
    ]
    assert days == ["2024-07-26"] * 2


@pytest.fixture
def checked(run, monkeypatch):
    """Runs the command like `run`, but reading or compiling a model is an error."""

    def enough(*given, **options):
        raise AssertionError("rows were opened")

    monkeypatch.setattr(evaluation, "opened", enough)
    return run


def test_bad_options_give_one_line(checked):
    for options, said in {
        "--tasks=mmmlu": "did you mean 'mmlu'",
        "--tasks=core --data=.": "core.yaml is missing",
        "--share=2/2": "--share=2/2: give I/N",
        "--file=mmlu": "--file=mmlu: give TASK=PATH",
        "--file=mmlu=nowhere.jsonl": "--file=mmlu = 'nowhere.jsonl': matches no file",
        "--file=mmlu=/dev/null": "--file=mmlu = '/dev/null': must be a file or folder",
        "--data=/dev/null": "--data = '/dev/null': must be a folder",
        "--file=mmul=x": "--file",
        "--batch=0": "--batch = 0: must be at least 1",
        "--calculator=x": "--calculator = 'x'",
        "--humaneval=x": "humaneval = 'x'",
        "--humaneval_helpers=x": "humaneval_helpers = 'x'",
        "--sandbox=x": "sandbox = 'x'",
        "--dtype=x": "dtype = 'x'",
        "--cache_dtype=int2": "--cache_dtype = 'int2': must be one of '', 'int8', 'int4'",
        "--compare=a": "--compare and --workdir: give one of them",
        "--tasks=mmlu --file=gsm8k=x": "gsm8k is not among --tasks=mmlu",
        "--data=nowhere": "hf download allenai/ai2_arc --repo-type=dataset --local-dir=",
        "--limit=-1": "--limit = -1: must be at least 0",
        "--num_tokens=0": "--num_tokens = 0: must be at least 1",
        "--share=0/65537": "--share=0/65537: give I/N with I from 0 to N - 1",
    }.items():
        status, out, err = checked(*options.split())
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1, err
    assert evaluate._share("65535/65536") == (65_535, 65_536)


def test_default_options():
    assert vars(evaluate.make_parser().parse([])) == dict(
        dict.fromkeys(("workdir", "tasks", "dtype", "cache_dtype", "out", "compare"), ""),
        **dict.fromkeys(("json", "markdown", "allow_unsandboxed_code"), False),
        data="~/data",
        file=[],
        step=None,
        batch=8,
        limit=0,
        num_tokens=512,
        calculator="nanochat",
        humaneval="chat",
        humaneval_helpers="program",
        sandbox="auto",
        share="0/1",
        ruler_lengths="4096",
        ruler_samples=20,
        ruler_seed=0,
        ruler_text="embedded",
    )


def test_a_malformed_row_is_named(checked, tmp_path):
    for task, row, said in (
        ("mmlu", dict(question="a"), "line 2: has no choices, answer"),
        ("humaneval", oracles.row("humaneval", 0) | dict(test="x = 1"), "defines no check(candi"),
    ):
        lines = map(json.dumps, (oracles.row(task, 0), row))
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        status, _, err = checked(f"--tasks={task}", f"--file={task}={tmp_path}/rows.jsonl")
        assert status == 2 and "rows.jsonl, line 2" in err and said in err


def test_model_without_a_chat_format(checked, tmp_path):
    other = workdirs.write(tmp_path / "plain", tokenizer=tokenizer_lib.byte_tokenizer())
    status, _, err = checked("--tasks=mmlu", workdir=other)
    assert status == 2 and "lacks <|user_start|>" in err


@pytest.mark.slow
def test_prompts_beyond_the_models_context_are_counted(run, tmp_path):
    other = workdirs.write(tmp_path / "short", context=50)
    _, _, err = run("--tasks=mmlu", "--limit=3", workdir=other)
    assert "mmlu: 3 of 3 prompts may exceed the training length of 50 tokens" in err


def test_humaneval_needs_a_sandbox(checked, monkeypatch):
    kinds = []

    def refuse(kind):
        kinds.append(kind)
        raise evaluate.sandbox.SandboxError("seccomp: ENOSYS (errno 38)")

    monkeypatch.setattr(evaluate.sandbox, "open", refuse)
    for given in ("--sandbox=auto", "--sandbox=wasm", "--allow_unsandboxed_code"):
        status, _, err = checked("--tasks=humaneval", given)
        assert status == 2 and "ENOSYS (errno 38)" in err and "--allow_unsandboxed_code" in err
    assert kinds == ["auto", "wasm", "none"]
