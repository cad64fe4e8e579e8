"""kvjax.lm_eval against a stand-in of lm-evaluation-harness, which needs no installation.

The model is a fake whose losses are a function of every token id and its position.
"""

import json
import os
import types

import jax
import numpy as np
import pytest

from kvjax import __version__
from kvjax.conversation.dialogue import NativeDialogue
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding import program
from kvjax.decoding.answers import Answer
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.scoring import Scored
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.lm_eval import __main__ as command
from kvjax.lm_eval.prompts import Prompts
from kvjax.model.transformer import Compute
from kvjax.workdir import trained
from tests.conversation import workdirs
from tests.lm_eval import stand_in

MAX_LENGTH, BOS = 40, 256
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return workdirs.write(tmp_path_factory.mktemp("seam") / "talks")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    tokenizer = tokenizer_lib.byte_tokenizer().with_specials(["<|e|>"])
    options = dict(tokenizer=tokenizer, template=TEMPLATE)
    return workdirs.write(tmp_path_factory.mktemp("seam") / "imported", **options)


class Scorer:
    """A scorer: losses are 3·id + 5·position summed over the context, plus a term of the token."""

    def __init__(self, generator, *, batch):
        self.generator, self.batch, self.asked = generator, batch, []

    def continuations(self, parts):
        self.asked.append([(list(before), list(after)) for before, after in parts])
        return [_scored(before, after) for before, after in parts]


def _scored(before, after) -> Scored:
    context_nats = sum(3 * token + 5 * place for place, token in enumerate(before))
    nats = context_nats + np.array([token / 7 + place for place, token in enumerate(after)])
    return Scored(nats, np.array(list(after)) % 2 == 0)


@pytest.fixture
def adapter(library, monkeypatch):
    """The adapter with fakes for loading and compiling; `given` has their arguments."""
    from kvjax.lm_eval import adapter

    adapter.given = given = []
    loaded = types.SimpleNamespace(model="a model", compute="computing")
    generator = types.SimpleNamespace(compute=Compute(cache_bits=8))
    monkeypatch.setattr(trained, "load", lambda *a, **k: given.append((a, k)) or loaded)
    monkeypatch.setattr(adapter, "Generator", lambda *a, **k: given.append((a, k)) or generator)
    monkeypatch.setattr(adapter, "Scorer", Scorer)
    adapter.generator = generator
    return adapter


def _requests(*of):
    return [types.SimpleNamespace(args=args) for args in of]


def test_constructor_options(adapter, library, workdir, imported):
    model = library.registered["kvjax"](
        str(workdir),
        step=0,
        dtype="bfloat16",
        cache_dtype="int8",
        batch_size=3,
        max_length=MAX_LENGTH,
        chips=2,
        seed=5,
        device="cpu",
        max_batch_size=9,
    )
    mesh = program.make_mesh(2, jax.local_devices())
    assert adapter.given == [
        ((workdir,), dict(step=0, dtype="bfloat16", cache_dtype="int8")),
        (("a model", "computing"), dict(mesh=mesh)),
    ]
    assert model._scorer.generator is adapter.generator and model._scorer.batch == 3
    prompts = Prompts(trained.find(workdir))
    assert model.get_model_info() == dict(
        workdir=str(workdir),
        step=0,
        tokenizer=prompts.name,
        dtype="float32",
        cache_dtype="int8",
        max_length=MAX_LENGTH,
        calculator="nanochat",
    )
    assert (model.max_length, model.max_gen_toks, model.batch_size) == (MAX_LENGTH, 20, 3)
    assert (model.eot_token_id, model.device) == (BOS, "cpu")
    assert model.tokenizer_name == prompts.name
    assert model.chat_template() is None and model.chat_template(True) == prompts.template
    user = [dict(role="user", content="a")]
    assert model.apply_chat_template(user) == prompts.render(user)
    begun = [*user, dict(role="assistant", content="b")]
    continued = model.apply_chat_template(begun, add_generation_prompt=False)
    assert continued == prompts.render(begun, opens_answer=False)
    assert model._ends == list(range(BOS, BOS + 9))
    assert os.environ["DISABLE_MULTIPROC"] == "1"

    adapter.given.clear()
    usual = adapter.KvjaxLM(imported)
    assert adapter.given[0][1] == dict(step=0, dtype="", cache_dtype="")
    assert adapter.given[1][1] == dict(mesh=None)
    assert (usual.max_length, usual.max_gen_toks, usual.batch_size) == (600, 256, 8)
    assert usual._seed == 0 and model._seed == 5
    with pytest.raises(UserError, match="--workdir is missing"):
        adapter.KvjaxLM()
    dtypes = dict(dtype="int8", cache_dtype="fp8")
    for name, value in (dtypes | dict(batch_size=0, max_length=1, device="tpu")).items():
        with pytest.raises(UserError, match=f"{name} = "):
            adapter.KvjaxLM(workdir, **{name: value})


def test_loglikelihood(adapter, workdir):
    """Scores 40 continuations longest first, some cut, with the cache written every 32 batches."""
    model = adapter.KvjaxLM(workdir, batch_size=1, max_length=MAX_LENGTH)
    texts = [("x" * (3 * i % 70) + " " * (i % 3), f"{i} y"[: 1 + i % 4]) for i in range(40)]
    expected = []
    for context, continuation in texts:
        kept = context.rstrip()
        before = [BOS, *kept.encode()]
        after = [*(context[len(kept) :] + continuation).encode()]
        if not context:
            before, after = [BOS], list(continuation.encode())
        expected.append((before[-(MAX_LENGTH + 1 - len(after)) :], after, len(before + after)))
    found = model.loglikelihood(_requests(*texts))
    scores = [_scored(before, after) for before, after, _ in expected]
    assert found == [(pytest.approx(-sum(s.nats)), s.is_greedy) for s in scores]
    order = sorted(range(40), key=lambda i: -expected[i][2])
    asked = [expected[i][:2] for i in order]
    assert model._scorer.asked == [asked[:32], asked[32:]]
    assert model.kept == [("loglikelihood", texts[i], found[i]) for i in order]

    def refused(said):
        return pytest.raises(UserError, match=said)

    with refused(f"continuation '' after '{'x' * 40}' has no tokens: it is empty"):
        model.loglikelihood(_requests(("x" * 50, "")))
    with refused(f"'{'y' * 40}' ... has 41 tokens, and the maximum is 40"):
        model.loglikelihood(_requests(("x", "y" * 41)))
    model.loglikelihood(_requests(("x", "y" * 40)))


def test_loglikelihood_rolling(adapter, workdir):
    """Scores 100 tokens in windows of 40; the last 20 tokens have 21 tokens of context."""
    model = adapter.KvjaxLM(workdir, batch_size=4, max_length=MAX_LENGTH)
    long, short = "".join(chr(32 + i % 90) for i in range(100)), "abc"
    ids = list(long.encode())
    windows = [([BOS], ids[:40]), ([ids[39]], ids[40:80]), (ids[59:80], ids[80:])]
    total = -sum(_scored(*window).nats.sum() for window in windows)
    rest = -_scored([BOS], short.encode()).nats.sum()
    found = model.loglikelihood_rolling(_requests((short,), (long,)))
    assert found == pytest.approx([rest, total]) and all(type(x) is float for x in found)
    names = ["loglikelihood_rolling"] * 2
    assert model.kept == list(zip(names, [(short,), (long,)], found, strict=True))


def test_generate_until(adapter, workdir, imported, monkeypatch):
    """Batches equal settings, pads the last batch, increments the seed, cuts prompts' starts."""
    calls = []

    def generate(generator, tokenizer, prompts, **how):
        assert generator is adapter.generator
        calls.append((list(prompts), how))
        said = [f"{len(p)} {how['seed']}" for p in prompts]
        parts = [[*tokenizer.encode(s), BOS + 1, *tokenizer.encode("yXzY")] for s in said]
        return types.SimpleNamespace(tokens=parts)

    monkeypatch.setattr(adapter, "generate", generate)
    model = adapter.KvjaxLM(workdir, batch_size=2, max_length=MAX_LENGTH, seed=5)
    greedy, warm = dict(max_gen_toks=7, until=["Y", "X"]), dict(do_sample=True, temperature=0.5)
    asked = [("a" * 9, greedy), ("b" * 50, greedy), ("c", warm), ("d" * 20, greedy)]
    found = model.generate_until(_requests(*asked))
    ids = {text[0]: [BOS, *text.encode()] for text, _ in asked}
    stops = dict(stop_tokens=list(range(BOS, BOS + 9)), end_at_special=False)
    cold = dict(num_tokens=7, sampling=Sampling(temperature=0.0), stop=("Y", "X", "<|bos|>"))
    hot = dict(num_tokens=20, sampling=Sampling(temperature=0.5), stop=("<|bos|>",))
    assert calls == [
        ([ids["b"][-33:], ids["d"]], cold | stops | dict(seed=5)),
        ([ids["a"], ids["a"]], cold | stops | dict(seed=6)),
        ([ids["c"]], hot | stops | dict(seed=7)),
    ]
    assert found == ["10 6y", "33 5y", "2 7yXzY", "21 5y"]
    kept = [("generate_until", asked[i], found[i]) for i in (1, 3, 0, 2)]
    assert model.kept == kept

    def answers(generator, talk, prompts, **how):
        assert generator is adapter.generator and isinstance(talk, NativeDialogue)
        calls.append((talk.name, list(prompts), how))
        return [Answer(text="an answer") for _ in prompts]

    monkeypatch.setattr(adapter, "answers", answers)
    calls.clear()
    context = model.apply_chat_template([dict(role="user", content="a")])
    assert model.generate_until(_requests((context, greedy))) == ["an answer"]
    how = cold | dict(seed=5, stop=("Y", "X"))
    assert calls == [(calls[0][0], [model.tok_encode(context)], how)]
    other = adapter.KvjaxLM(imported, max_length=MAX_LENGTH)
    context = other.apply_chat_template([dict(role="user", content="a")])
    assert other.generate_until(_requests((context, greedy))) == ["1 0y"]


RESULTS = {
    "results": {
        "mine": {
            "alias": "mine",
            "acc,none": 0.5,
            "acc_stderr,none": 0.25,
            "em,strict": "n/a",
            "em_stderr,strict": "N/A",
        },
    },
    "groups": {"all": {"acc,none": 1}},
    "group_subtasks": {"all": ["mine"]},
    "versions": {"mine": 2},
    "n-shot": {"mine": 3},
    "n-samples": {"mine": dict(original=9, effective=4)},
    "higher_is_better": {"mine": dict(acc=True)},
    "configs": {"mine": dict(doc_to_text=len)},
    "samples": {"mine": [dict(doc="\ud800")]},
    "git_hash": "of the library",
}
TABLE = """
task  filter  shots  metric   value  standard error
----  ------  -----  ------  ------  --------------
mine  none        3  acc     0.5000          0.2500
mine  strict      3  em         n/a
all   none           acc          1
"""


def test_command(adapter, index, library, workdir, tmp_path, monkeypatch, capsys):
    asked, file = [], tmp_path / "new" / "results.json"

    def evaluate(**given):
        print("of the library")
        asked.append(given)
        return RESULTS

    monkeypatch.setattr(library, "simple_evaluate", evaluate, raising=False)
    monkeypatch.setattr(command.runtime, "start", lambda: None)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "x.yaml").write_text("")
    monkeypatch.setattr(stand_in.TaskManager, "folders", {str(tmp_path / "own"): stand_in.OWN})
    arguments = [f"--workdir={workdir}", "--tasks=mine, gsm8k", f"--include_path={tmp_path}/own"]
    more = ["--num_fewshot=3", "--limit=4", "--batch_size=2", "--max_length=40", "--chips=2"]
    more += ["--apply_chat_template", "--system=Be short.", "--step=0", "--dtype=float32"]
    more += ["--cache_dtype=int4"]
    more += ["--seed=6", f"--out={file}", "--json"]
    assert command_line.status(command.main, arguments + more) == 0
    out, err = capsys.readouterr()
    assert TABLE in err and err.endswith(f"\n\nwritten: {file}\n") and "of the library" in err
    ((model, read),) = [(given.pop("model"), given.pop("tasks")) for given in asked]
    assert [task.config.task for task in read] == ["mine", "gsm8k"]
    assert (model._seed, model.batch_size, model.max_length) == (6, 2, 40)
    assert adapter.given[0][1] == dict(step=0, dtype="float32", cache_dtype="int4")
    assert adapter.given[1][1]["mesh"] is not None
    assert asked == [
        dict(
            num_fewshot=3,
            limit=4,
            log_samples=True,
            system_instruction="Be short.",
            apply_chat_template=True,
            bootstrap_iters=1000,
        )
    ]
    kept = json.loads(file.read_text())
    about = dict(batch_size=2, limit=4, seed=6, apply_chat_template=True, system="Be short.")
    about |= dict(kvjax=__version__, lm_eval="0.4.13")
    known = {key: value for key, value in RESULTS.items() if key != "git_hash"}
    known["configs"] = {"mine": dict(doc_to_text=str(len))}
    assert kept == dict(model=model.get_model_info() | about) | known
    assert json.loads(out) == {key: value for key, value in kept.items() if key != "samples"}

    asked.clear()
    plain = [f"--workdir={workdir}", "--tasks=gsm8k"]
    assert command_line.status(command.main, plain) == 0
    out, err = capsys.readouterr()
    assert out == TABLE and "written" not in out + err
    (given,) = asked
    model = given.pop("model")
    assert (model._seed, model.batch_size, model.max_length) == (0, 8, 600)
    assert len(given.pop("tasks")) == 1 and given.pop("bootstrap_iters") == 1000
    assert not any(given.values())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.Output, "table", full)
    monkeypatch.setattr(command.target_lib.tempfile, "tempdir", str(tmp_path))
    assert command_line.status(command.main, plain) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the table cannot be printed (No space left on device). Nothing is lost: " in said
    assert json.loads(open(said.rpartition(" ")[2]).read())["model"]["seed"] == 0
    assert command_line.status(command.main, [*plain, f"--out={file}"]) == 2
    assert capsys.readouterr().err.endswith("kvjax: [Errno 28] No space left on device\n")
