"""python -m kvjax.chat: answers, history, full contexts, Ctrl-C."""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from kvjax.chat import __main__ as chat, history as history_lib
from kvjax.chat.history import History
from kvjax.conversation.render import Renderer
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from tests.conversation import workdirs
from tests.evaluate import oracles
from tests.evaluate.oracles import DIALOGUE, TOKENIZER, Scripted

S = DIALOGUE.specials


def _talk(scripts, room=400, *, num_tokens=64):
    """Returns a session whose model answers with the scripts, one per message."""

    class Model:
        def start(self, prompts, **options):
            self.prompts = prompts
            return Scripted([scripts.pop(0)]).start(prompts, **options)

    options = chat._parser().parse([f"--num_tokens={num_tokens}"])
    history, model = History(DIALOGUE, room), Model()
    return chat.ChatSession(model, DIALOGUE, history, options, None, room + num_tokens), model


def test_calculator_calls_are_shown_and_kept_as_parts(capsys):
    asked = [*TOKENIZER.encode("So "), S.python_start, *TOKENIZER.encode("2+3"), S.python_end]
    talk, model = _talk([[*asked, *oracles.answer_tokens("."), 0], oracles.answer_tokens("Bye")])
    talk.handle_line("What is 2 + 3?")
    assert capsys.readouterr().out == "So [2+3=5].\n"
    talk.handle_line("Thanks")
    assert talk.history.messages == [
        dict(role="user", content="What is 2 + 3?"),
        dict(
            role="assistant",
            content=[
                dict(type="text", text="So "),
                dict(type="python", text="2+3"),
                dict(type="python_output", text="5"),
                dict(type="text", text="."),
            ],
        ),
        dict(role="user", content="Thanks"),
        dict(role="assistant", content="Bye"),
    ]
    # The second prompt starts with the first question and its answer, as generated.
    whole = Renderer(TOKENIZER)(dict(messages=talk.history.messages[:2]))
    assert model.prompts[0][: len(whole.ids)] == whole.ids


def test_oldest_turns_are_left_out(capsys):
    talk, model = _talk([oracles.answer_tokens("answer one") for _ in range(9)], room=60)
    for i in range(5):
        talk.handle_line(f"message {i}")
        ids = model.prompts[0]
        assert len(ids) <= 60 and ids[0] == S.bos and ids[1] == S.user_start
        assert TOKENIZER.decode(ids).endswith(f"message {i}<|user_end|><|assistant_start|>")
    assert "the first 2 turn(s) are left out" in capsys.readouterr().err
    assert len(talk.history.turns) == 10  # nothing is forgotten


def test_too_long_messages_are_refused(capsys):
    talk, _ = _talk([oracles.answer_tokens("yes")], room=40)
    talk.handle_line("x" * 50)
    assert "the message has 54 tokens" in capsys.readouterr().err and not talk.history.turns
    talk.handle_line("short")
    assert capsys.readouterr().out == "yes\n"


def test_unanswered_messages_are_forgotten(capsys):
    """An empty answer and a failed one; earlier turns stay."""
    talk, model = _talk([oracles.answer_tokens("yes"), oracles.answer_tokens("")])
    talk.handle_line("first")
    before = list(talk.history.turns)
    talk.handle_line("second")
    assert talk.history.turns == before and capsys.readouterr().out == "yes\n\n"
    for error in (UserError("it broke"), MemoryError()):

        def fails(*_, error=error, **__):
            raise error

        model.start = fails
        with contextlib.suppress(MemoryError):
            talk.handle_line("third")
        assert talk.history.turns == before
    assert "it broke" in capsys.readouterr().err


def test_commands(tmp_path, capsys, monkeypatch):
    talk, _ = _talk([oracles.answer_tokens("one"), oracles.answer_tokens("two")])
    path = tmp_path / "talk.jsonl"
    talk.handle_line(f"/save {path}")
    assert "there is nothing to save" in capsys.readouterr().err
    talk.handle_line("first")
    talk.handle_line(f"/save {path}")
    talk.handle_line("/reset")
    talk.handle_line("second")
    talk.handle_line(f"/save {path}")
    saved = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert [[m["content"] for m in one] for one in saved] == [["first", "one"], ["second", "two"]]
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    talk.handle_line(f"/save {path}")
    assert len(list(map(json.loads, path.read_text().splitlines()))) == 3
    talk.handle_line("/help")
    out = capsys.readouterr().out
    assert out.splitlines()[2:] == [
        "/reset      starts a new conversation",
        "/save FILE  appends the conversation to a file, as a line of JSON that mid-training reads",
        "/help       lists the commands",
        "/quit       ends the program, like Ctrl-D",
    ]
    talk.history.add_question("without an answer")  # is not saved
    talk.handle_line(f"/save {path}")
    assert path.read_text().splitlines()[-1] == path.read_text().splitlines()[-2]
    monkeypatch.setattr(history_lib, "in_bucket", lambda path: True)  # buckets cannot append
    again = path.read_text()
    talk.handle_line(f"/save {path}")
    assert path.read_text() == again + again.splitlines(keepends=True)[-1]
    talk.handle_line(f"/save {tmp_path}/new.jsonl")
    assert (tmp_path / "new.jsonl").read_text() == again.splitlines(keepends=True)[-1]
    for line, said in {
        "/rest": "/rest: there is no such command; did you mean '/reset'?",
        "/save": "/save FILE: which file?",
        f"/save {tmp_path}": "cannot be written",
        "\ud800": "is not UTF-8 text",
    }.items():
        talk.handle_line(line)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        talk.handle_line("/quit")


def test_ctrl_c_ends_an_answer(capsys, monkeypatch):
    talk, _ = _talk([oracles.answer_tokens("a long answer"), oracles.answer_tokens("next")])
    real = chat._AnswerPrinter.token

    def token(self, b, token, text):
        real(self, b, token, text)
        if len(self.ids) == 6:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat._AnswerPrinter, "token", token)
    before = signal.getsignal(signal.SIGINT)
    talk.handle_line("go on")
    assert capsys.readouterr().out == "a long\n"
    assert talk.history.turns[-1] == dict(role="assistant", content="a long")
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(chat._AnswerPrinter, "token", real)
    talk.handle_line("more")
    assert capsys.readouterr().out == "next\n"


@pytest.mark.parametrize(
    ("ids", "content"),
    [
        ([S.python_end, 65], "<|python_end|>A"),
        ([65, S.python_start, 66], "A<|python_start|>B"),
        ([65, S.output_start, 66, S.output_end], [("text", "A"), ("python_output", "B")]),
        ([S.python_start, 66, S.python_end], [("python", "B")]),
    ],
)
def test_incomplete_calls_are_text(ids, content):
    found = history_lib.message_content(TOKENIZER, S, ids)
    if isinstance(content, str):
        text = found if isinstance(found, str) else "".join(part["text"] for part in found)
        assert text == content
    else:
        assert [(part["type"], part["text"]) for part in found] == content


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return workdirs.write(tmp_path_factory.mktemp("talking") / "run")


@pytest.fixture
def run(workdir, capsys, monkeypatch):
    """A function of flags and input: (exit status, standard output, standard error)."""
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)

    def command(*given, text="", workdir=workdir):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        arguments = [f"--workdir={workdir}", *given]
        return command_line.status(chat.main, arguments), *capsys.readouterr()

    return command


def test_options_reach_the_model(run, monkeypatch):
    """Each answer is part of the next prompt; given options, and defaults."""
    seen, loaded = [], []

    def start_loading(workdir, **options):
        loaded.append(options)
        return lambda saved: types.SimpleNamespace(model="model", compute="compute")

    def answers(generator, dialogue, prompts, *, on_token, **options):
        seen.append((TOKENIZER.decode(prompts[0]), options))
        on_token(0, ord("A"), "A")

    def made(model, compute, *, stored):
        return types.SimpleNamespace(positions=None, made_of=(model, compute))

    monkeypatch.setattr(chat.trained, "start_loading", start_loading)
    monkeypatch.setattr(chat, "Generator", made)
    monkeypatch.setattr(chat, "answers", answers)
    given = "--system=Be. --num_tokens=7 --temperature=0.3 --top_k=9 --top_p=0.5 --context=80"
    given = [*given.split(), "--seed=4294967295", "--calculator=dataset", "--dtype=float32"]
    given.append("--cache_dtype=int8")
    opened = "<|bos|><|user_start|>{}{}<|user_end|><|assistant_start|>"
    told = "A<|assistant_end|><|user_start|>{}<|user_end|><|assistant_start|>"
    sampling = Sampling(temperature=0.3, top_k=9, top_p=0.5)
    options = dict(num_tokens=7, sampling=sampling, mode="dataset", capacity=80)
    plain = dict(num_tokens=256, mode="nanochat", capacity=600)
    plain |= dict(sampling=Sampling(temperature=0.6, top_k=50, top_p=1.0))
    for flags, system, expected, seeds, dtype, cache_dtype in (
        (given, "Be.\n\n", options, (4294967295, 0), "float32", "int8"),
        ([], "", plain, (0, 1), "", ""),
    ):
        seen.clear()
        assert run(*flags, text="Hi\n\nOn\n") == (0, "A\nA\n\n", "")
        first = opened.format(system, "Hi")
        prompts = [first, first + told.format("On")]
        assert seen == [
            (prompt, expected | dict(seed=seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        dtypes = dict(dtype=dtype, cache_dtype=cache_dtype)
        assert loaded[-1] == dict(step=None, programs=True) | dtypes
    # A prompt may have the context less --num_tokens: here 26 tokens, then 25.
    assert run("--context=30", "--num_tokens=4", text="x" * 22)[2] == ""
    assert "there is room for 26" in run("--context=30", "--num_tokens=4", text="x" * 23)[2]
    assert command_line.status(chat.main, []) == 2
    run("--context=100", text="Hi\n")  # shorter than the default answer
    assert seen[-1][1]["num_tokens"] == 50


@pytest.mark.slow
def test_a_conversation_from_standard_input(run):
    status, out, err = run("--num_tokens=4", text="Hello\n\nAnd now?\n")
    assert (status, err) == (0, "") and out.count("\n") >= 3
    assert run("--num_tokens=4", text="Hello\n\nAnd now?\n")[1] == out
    assert run("--num_tokens=4", "--seed=5", text="Hello\n\nAnd now?\n")[1] != out


def test_bad_options_give_one_line(run, monkeypatch):
    for option, said in {
        "--num_tokens=600": "--num_tokens=600: leaves no room for a message",
        "--temperature=-1": "--temperature = -1.0",
        "--calculator=abacus": "--calculator = 'abacus'",
        "--context=-1": "--context = -1",
        "--step=7": "has no such checkpoint",
    }.items():
        status, out, err = run(option)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1, err
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UserError, match="standard input is not UTF-8 text: 'utf-8' codec can't"):
        next(chat.lines())


def test_terminal_prompt(monkeypatch, capsys):
    stdin = io.StringIO("Hello\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(chat.lines()) == ["Hello"] and capsys.readouterr().out == "> > \n"


def test_context(capsys):
    """Warns beyond the trained length; refuses lengths beyond the positions."""
    for context, positions, trained, num_tokens, expected, said in (
        (0, None, 600, 599, 600, ""),
        (0, 500, 600, 499, 500, ""),
        (500, 500, 600, 4, 500, ""),
        (501, 500, 600, 4, None, "--context=501: the model's positions end after 500 tokens"),
        (600, None, 600, 4, 600, ""),
        (601, None, 600, 4, 601, "--context=601: the model was trained on 600 tokens at a time"),
        (0, None, 600, 600, None, "--num_tokens=600: leaves no room for a message in a context of"),
    ):
        options = argparse.Namespace(context=context, num_tokens=num_tokens)
        found = types.SimpleNamespace(context=trained)
        model = types.SimpleNamespace(positions=positions)
        if expected is None:
            with pytest.raises(UserError, match=said):
                chat._context(options, found, model)
            continue
        assert chat._context(options, found, model) == expected
        warned = capsys.readouterr().err
        assert said in warned and bool(said) == bool(warned)


def test_model_without_a_chat_format(run, tmp_path):
    other = workdirs.write(tmp_path / "run", tokenizer=tokenizer_lib.byte_tokenizer())
    status, _, err = run(workdir=other, text="Hello\n")
    assert status == 2 and "lacks <|user_start|>" in err and "configs/mid.py:" in err


@pytest.mark.slow
def test_ctrl_c_ends_the_program(workdir):
    command = [sys.executable, "-m", "kvjax.chat", f"--workdir={workdir}", "--num_tokens=4"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, **pipes, cwd=ROOT, text=True) as process:
        process.stdin.write("Hello\n")
        process.stdin.flush()
        process.stdout.readline()  # an answer
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.slow
def test_long_conversations_are_not_cut(run, tmp_path, monkeypatch):
    """A conversation longer than rows of mid-training, in a context that holds it."""
    other = workdirs.write(tmp_path / "run", context=4000)
    seen = []
    real = chat.answers
    monkeypatch.setattr(
        chat,
        "answers",
        lambda g, d, prompts, **o: seen.append(prompts[0]) or real(g, d, prompts, **o),
    )
    status, _, err = run("--num_tokens=2", workdir=other, text=f"{'x' * 2500}\nthe end\n")
    assert (status, err) == (0, "")
    assert TOKENIZER.decode(seen[1]).endswith("the end<|user_end|><|assistant_start|>")
    assert len(seen[1]) > 2500
