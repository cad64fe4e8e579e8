"""RULER: prompts that fit and have their answers, the metric, the command with an oracle."""

import collections
import itertools
import json
import random
import re

import pytest

from kvjax.conversation.dialogue import PlainDialogue, TemplatedDialogue
from kvjax.data import tokenizer
from kvjax.evaluate import __main__ as evaluate, ruler, ruler_materials, ruler_tasks
from kvjax.evaluate.letters import prompt_hash
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.errors import UserError
from tests import sentencepiece_files
from tests.conversation import workdirs
from tests.evaluate import oracles

LENGTH = 8000  # tokens of one byte: at least 4,096, as cwe then repeats its words more often
NEEDLE = re.compile(r"A secret (?:number|UUID) for (\S+) is ([\w-]+)\.")
PLAIN = PlainDialogue(oracles.TOKENIZER)
QUESTIONS = {  # by task, a file of its form
    "qa_1": dict(
        data=[
            dict(
                paragraphs=[
                    dict(
                        context=f"Of {town}: its river is the {river}.",
                        qas=[
                            dict(question=f"Which river has {town}?", answers=[dict(text=river)]),
                            dict(question="Which sea?", answers=[], is_impossible=True),
                        ],
                    )
                    for town, river in (("Ulm", "Danube"), ("Bonn", "Rhine"))
                ]
            ),
            dict(paragraphs=[dict(context="Rome was not built in a day.", qas=[])]),
        ]
    ),
    "qa_2": [
        dict(
            question=f"Which town is {i} leagues from Ulm?",
            answer=f"Town {i}",
            context=[[f"Town {i}", ["It is ", f"{i} leagues off."]], ["Ulm", ["A town."]]],
        )
        for i in range(3)
    ],
}


@pytest.mark.parametrize("blank", ["", " "])
def test_answers_begin_as_the_template_writes_them(blank):
    """With Llama 2's form, an answer's first word follows [/INST] after a blank."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        f"{{% else %}}{{{{ '{blank}' + m.content + eos_token }}}}{{% endif %}}{{% endfor %}}"
    )
    made = tokenizer.from_json(sentencepiece_files.backend("metaspace").to_str(), "Llama 2")
    names = {"tokenizer_config.json": dict(bos_token="<s>", eos_token="</s>")}
    dialogue = TemplatedDialogue(made, template, names)
    ids = ruler.prompt(dialogue, ruler_tasks.Sample("the cat", " the end", ("x",)))
    whole = dialogue.tokenizer.encode(f"[INST] the cat [/INST]{blank}the end")
    assert ids == whole and f"[/INST]{blank}the" in dialogue.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for name, content in QUESTIONS.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {name: str(folder / f"{name}.json") for name in QUESTIONS}


def _options(files, **changes):
    given = dict(names=("ruler",), lengths=str(LENGTH), samples=3, seed=0, text="embedded")
    named = {f"ruler_{name}": path for name, path in files.items()}
    return ruler.options(**(given | dict(files=named) | changes))


@pytest.fixture(scope="module")
def sets(files):
    """All tasks in chat format, by name."""
    made = ruler.make(_options(files), oracles.DIALOGUE)
    return {each.task.name: each for each in made.values()}


def _texts(asked: ruler.RulerSet) -> list[str]:
    return [oracles.TOKENIZER.decode(ids.tolist()) for ids in asked.prompts]


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_fill_the_length(files, monkeypatch):
    """With one more unit of its haystack, a prompt and its answer would be too long."""
    fitting, checked = ruler._fitting, collections.Counter()

    def watched(task, materials, seed, index, dialogue, size):
        found, sample = fitting(task, materials, seed, index, dialogue, size)
        rng = random.Random(f"{seed} {task.name} {LENGTH} {index}")
        more = task.make(materials, rng, index, found + 1)
        lengths = [len(ruler.prompt(dialogue, each)) + task.num_tokens for each in (sample, more)]
        assert lengths[0] <= LENGTH < lengths[1], (task.name, index, lengths)
        checked[task.name] += 1
        return found, sample

    monkeypatch.setattr(ruler, "_fitting", watched)
    made = ruler.make(_options(files), PLAIN)
    assert set(checked) == set(ruler_tasks.TASKS) and set(checked.values()) <= {2, 3}
    for asked in made.values():
        assert max(map(len, asked.prompts)) + asked.task.num_tokens <= LENGTH


def test_the_largest_size_is_found_in_a_few_steps():
    """Units of random numbers of tokens, some of several units at once."""
    rng = random.Random(1)
    for _ in range(200):
        units = [rng.choice((0, 1, 1, 2, 9)) for _ in range(3000)]
        sums, tried = list(itertools.accumulate(units, initial=7)), []

        def tokens(size, sums=sums, tried=tried):
            tried.append(size)
            return sums[size]

        low, most = rng.randrange(5), rng.randrange(40, 3000)
        size = ruler.largest(tokens, most, low, sums[low], rng.randrange(1, 700))
        assert sums[size] <= most < sums[size + 1] and len(tried) < 30


def test_prompts_are_a_function_of_seed_and_index(files, sets):
    again = ruler.make(
        _options(files, names=("ruler_vt", "ruler_qa_2"), samples=2), oracles.DIALOGUE
    )
    other = ruler.make(_options(files, names=("ruler_vt",), seed=1), oracles.DIALOGUE)
    for asked in again.values():
        before = sets[asked.task.name]
        assert [ids.tolist() for ids in asked.prompts] == [
            ids.tolist() for ids in before.prompts[:2]
        ]
        assert asked.digest == before.digest
    assert not {ids.tobytes() for ids in sets["vt"].prompts} & {
        ids.tobytes() for each in other.values() for ids in each.prompts
    }


def test_chats_and_plain_texts_open_the_answer(files):
    """The start of the answer follows the user's message in its turn, or the plain text."""
    given = _options(files, names=("ruler_qa_1",), samples=1)
    texts = []
    for dialogue in (oracles.DIALOGUE, PLAIN):
        (asked,) = ruler.make(given, dialogue).values()
        texts += _texts(asked)
    for text in texts:
        assert text.startswith("<|bos|>") and text.count("Answer:") == 1
    assert "Which river has Ulm?<|user_end|><|assistant_start|>Answer:" in texts[0]
    assert texts[1].endswith("Question: Which river has Ulm? Answer:")


# -- answers that readers of the prompts find ------------------------------------------------------


def _read_needles(text: str) -> list[str]:
    asked = re.search(r"does the text above give for (.*)\?", text)[1]
    values = {}
    for key, value in NEEDLE.findall(text):
        values.setdefault(key, []).append(value)
    return [v for key in re.split(r", | and ", asked) for v in values[key]]


def _read_variables(text: str) -> list[str]:
    """Executes the assignments of the last question."""
    *_, question = text.split("The following text hides")
    values = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question):
        values[name] = values.get(source, source)
    asked = re.search(r"have the value (\d+) in the text", question)[1]
    return [name for name, value in values.items() if value == asked]


def _read_common(text: str) -> list[str]:
    *_, question = text.split("The numbered list below")
    counts = collections.Counter(re.findall(r"\d+\. (\w+)", question)).most_common()
    assert counts[9][1] > 3 * counts[10][1]
    return [word for word, _ in counts[:10]]


def _read_coded(text: str) -> list[str]:
    words = re.search(r"occur most often\. (.*)\nQuestion", text)[1].split()
    counts = collections.Counter(words).most_common()
    assert counts[0][0] == "..." and counts[3][1] > counts[4][1]
    return [word for word, _ in counts[1:4]]


def _read_documents(text: str) -> list[str]:
    town = re.search(r"Which river has (\w+)\?", text)
    if town:
        return [re.search(rf"Of {town[1]}: its river is the (\w+)\.", text)[1]]
    leagues = re.search(r"Which town is (\d) leagues", text)[1]
    return [re.search(rf"(Town {leagues})\nIt is {leagues} leagues off\.", text)[1]]


READERS = dict(vt=_read_variables, cwe=_read_common, fwe=_read_coded)
READERS |= dict.fromkeys(("qa_1", "qa_2"), _read_documents)


def read(name: str, text: str) -> list[str]:
    """Returns the answers that a perfect reader of a prompt gives."""
    return READERS.get(name, _read_needles)(text)


def test_a_needle_is_in_the_prompt_once(sets):
    hidden = dict(niah_multikey_1=4, niah_multivalue=4, niah_multiquery=4)
    for name, asked in sets.items():
        if not name.startswith("niah"):
            continue
        places = []
        for text, answers in zip(_texts(asked), asked.answers, strict=True):
            needles = NEEDLE.findall(text)
            keys = {key for key, _ in needles}
            if name in ("niah_multikey_2", "niah_multikey_3"):
                assert len(needles) > 10 and len(keys) == len(needles)
            else:
                assert len(needles) == hidden.get(name, 1)
            assert [text.count(answer) for answer in answers] == [1] * len(answers)
            assert len(answers) == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
            places.append(text.index(answers[0]))
        assert len(set(places)) > 1, name


def test_a_perfect_reader_scores_1_and_an_empty_answer_0(sets):
    """The prompt determines the answers; half an answer is worth half, or all of a question."""
    for name, asked in sets.items():
        count = len(asked.answers[0])

        def scores(answer, name=name, asked=asked):
            model = oracles.Oracle(
                text=lambda text: oracles.answer_tokens(answer(read(name, text)))
            )
            rows = ruler.ask(model, asked, range(len(asked.prompts)))
            assert [row["prompt"] for row in rows] == [prompt_hash(ids) for ids in asked.prompts]
            assert [row["right"] for row in rows] == [row["score"] == 1 for row in rows]
            return {row["score"] for row in rows}

        assert scores(" ".join) == {1}, name
        assert scores(lambda found: "") == {0}, name
        assert scores(lambda found: found[0].upper()) == {1 / count}, name
    assert {len(each.answers[0]) for each in sets.values()} == {1, 3, 4, 5, 10}


def test_needles_lie_between_lines_in_their_order():
    for seed in range(20):
        found = ruler_tasks._between(["a", "b"], list("123"), random.Random(seed))
        assert sorted(found) == sorted("ab123") and found.index("a") < found.index("b")
        assert [text for text in found if text.isdigit()] == list("123")


def test_scores_of_texts():
    two = ("AB", "cd")
    for text, answers, share, one in (
        ("ab and CD.", two, 1, 1),
        ("xaby", two, 0.5, 1),
        ("", two, 0, 0),
        ("a b", two, 0, 0),
        ("a\x00b c", ("a\nb",), 1, 1),
        ("1. first 2. other", ("first", "second", "third"), 1 / 3, 1),
    ):
        assert ruler.score(text, answers) == share
        assert ruler.score(text, answers, any_answer=True) == one


def test_a_short_text_is_repeated(tmp_path):
    (tmp_path / "text.txt").write_text("One two.\n\n three\tfour.\n")
    found = ruler_materials.running_text(str(tmp_path / "text.txt"), 6)
    assert found == ["One", "two.", "three", "four.", "One", "two."]


# -- the command -----------------------------------------------------------------------------------


class Reader(oracles.Oracle):
    """A perfect reader until it is interrupted; a poor one gives the first answer only."""

    def __init__(self, tokenizer, dialogue, batch, poor, until):
        super().__init__(text=self._answer)
        self.tokenizer, self.dialogue, self.batch = tokenizer, dialogue, batch
        self._poor, self._until, self.asked = poor, until, 0

    def _answer(self, text):
        if self.asked == self._until:
            raise KeyboardInterrupt
        self.asked += 1
        name = "vt" if "assignments" in text else "cwe" if "numbered list" in text else "niah"
        found = read(name, text)
        return oracles.answer_tokens(" ".join(found[:1] if self._poor else found))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a function of flags and of Reader: (status, result, standard error, rows asked)."""
    workdir = workdirs.write(tmp_path / "run", context=LENGTH)
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)

    def command(*given, poor=False, until=-1):
        models = []

        def served(generator, tokenizer, dialogue, *, batch):
            models.append(Reader(tokenizer, dialogue, batch, poor, until))
            return models[0]

        monkeypatch.setattr(evaluate, "CachedModel", served)
        fixed = [f"--workdir={workdir}", f"--ruler_lengths={LENGTH}", "--ruler_samples=4"]
        status = command_line.status(evaluate.main, [*fixed, "--batch=2", "--json", *given])
        out, err = capsys.readouterr()
        result = json.loads(out) if out else {}
        return status, result, err, models[0].asked if models else 0

    command.workdir = workdir
    return command


THREE = "--tasks=ruler_niah_single_1,ruler_vt,ruler_cwe"
NAMES = [f"ruler_{name}_{LENGTH}" for name in ("niah_single_1", "vt", "cwe")]


def test_command_resumes_and_compares(run, capsys):
    assert run(THREE, until=5)[0] == 130
    rows = run.workdir / "evaluations" / "0" / f"{NAMES[0]}.jsonl"
    assert len(rows.read_text().splitlines()) == 4
    status, result, err, asked = run(THREE)
    assert (status, asked) == (0, 12 - 4), err
    assert list(result["tasks"]) == NAMES and {t["accuracy"] for t in result["tasks"].values()} == {
        1
    }
    mean = result["ruler"][f"ruler_{LENGTH}"]
    assert (mean["value"], mean["tasks"]) == (1, 3) and mean["low"] < 0.8
    assert f"tasks of the means: ruler_{LENGTH} 3 of 13." in " ".join(err.split())
    assert run(THREE, "--ruler_samples=5")[3] == 3  # one more of each
    status, _, err, _ = run(THREE, "--ruler_seed=3")
    assert status == 2 and "have seed = 0, but this command has 3" in err

    other = f"--out={run.workdir}/poor"
    _, result, _, _ = run(THREE, other, poor=True)
    found = {name: task["accuracy"] for name, task in result["tasks"].items()}
    assert found == pytest.approx(dict(zip(NAMES, (1, 0.2, 0.1), strict=True)))
    assert [task["right"] for task in result["tasks"].values()] == [4, 0, 0]
    sides = f"--compare={run.workdir},{run.workdir}/poor"
    assert command_line.status(evaluate.main, [sides, "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert tasks[NAMES[1]]["difference"]["value"] == pytest.approx(0.8)
    assert tasks[NAMES[1]]["rows"] == 4 and tasks[NAMES[1]]["only_one"] == pytest.approx(4 * 0.8)
    mean = tasks[f"ruler_{LENGTH}"]
    assert mean["difference"]["value"] == pytest.approx((0 + 0.8 + 0.9) / 3) and mean["tasks"] == 3


def test_bad_options(run, files, tmp_path):
    (tmp_path / "bad.json").write_text('[{"question": "a", "answer": "", "context": []}]')
    for options, said in {
        "--tasks=ruler_vtt": "did you mean 'ruler_vt'",
        "--tasks=ruler --ruler_lengths=1k": "--ruler_lengths '1k': must be integers of 1 to",
        "--tasks=ruler --ruler_lengths=0": "--ruler_lengths '0': must be integers of 1 to",
        "--tasks=ruler_vt --ruler_lengths=99": "--ruler_lengths = 99: too short for vt, whose",
        "--tasks=ruler --ruler_samples=0": "--ruler_samples = 0: must be at least 1 and",
        "--tasks=ruler --ruler_seed=-1": "--ruler_seed = -1: must be at least 0",
        "--tasks=ruler --ruler_text=nowhere.txt": "--ruler_text = 'nowhere.txt': matches no file",
        "--tasks=ruler --ruler_text=": "--ruler_text = '': names no source",
        "--tasks=ruler_qa_1": "ruler_qa_1 has no questions: give --file=ruler_qa_1=PATH",
        "--tasks=ruler --file=ruler_qa_2=x.json": "--file=ruler_qa_2 = 'x.json': is not a file",
        f"--tasks=ruler --file=ruler_qa_1={files['qa_2']}": "has another form (TypeError",
        f"--tasks=ruler --file=ruler_qa_2={tmp_path}/bad.json": "a question without an answer",
        f"--tasks=ruler_vt --file=ruler_qa_1={files['qa_1']}": "ruler_qa_1 is not among --tasks",
        "--tasks=mmlu --ruler_samples=4": "no task of RULER is in --tasks",
    }.items():
        status, _, err, _ = run(*options.split())
        assert status == 2 and said in err and err.count("\n") == 1, (options, err)


def test_lengths_beyond_the_model(files):
    given = _options({}, lengths="512,2048")
    with pytest.raises(UserError, match="--ruler_lengths = 2048: must be at most 1,024, the"):
        ruler.check_lengths(given, 1024, 1024)
    said = ruler.check_lengths(given, 2048, 1024)
    assert [text.partition(": give")[0] for text in said] == [
        "ruler: qa_1 is left out",
        "ruler: qa_2 is left out",
        "ruler: 2,048 tokens exceed the training length of 1,024",
    ]
    assert ruler.check_lengths(_options(files), None, LENGTH) == []


@pytest.mark.slow
def test_a_model_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "start", lambda: None)
    workdir = workdirs.write(tmp_path / "run")
    given = ["--tasks=ruler_niah_single_1", "--ruler_lengths=900", "--ruler_samples=3", "--json"]
    arguments = [f"--workdir={workdir}", "--batch=2", *given]
    assert command_line.status(evaluate.main, arguments) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"].values()
    assert (task["rows"], task["of"], task["dialogue"]) == (3, 3, "nanochat")
