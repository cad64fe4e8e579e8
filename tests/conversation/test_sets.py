"""Files of five rows in each published format become the expected conversations."""

import json
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.conversation import prepare, sets
from kvjax.conversation.mixture import SetSpec
from kvjax.foundation.errors import DataError, MissingDataError

PROMPT = "Multiple Choice question: {}\n{}\n\nRespond only with the letter of the correct answer."
MMLU = [
    dict(question=f"Q{i}?", subject="", choices=choices, answer=answer)
    for i, (choices, answer) in enumerate(
        [
            (["a", "b", "c", "d"], 0),
            (["1", "2", "3", "4"], 3),
            (["", "b", "", "d"], 1),
            (["é", "中", "c", "d"], 2),
            (["a\nb", "=B", "c", "d"], 1),
        ]
    )
]
ARC = [
    dict(id="1", question="Q0?", choices=dict(text=["a", "b", "c", "d"], label=[*"ABCD"])),
    dict(id="2", question="Q1?", choices=dict(text=["a", "b", "c", "d"], label=[*"1234"])),
    dict(id="3", question="Q2?", choices=dict(text=["a", "b", "c"], label=[*"ABC"])),
    dict(id="4", question="Q3?", choices=dict(text=["a", "b", "c", "d", "e"], label=[*"ABCDE"])),
    dict(id="5", question="Q4?", choices=dict(text=["a", "b", "c", "d", "e"], label=[*"12345"])),
]
ARC = [row | dict(answerKey=row["choices"]["label"][-1]) for row in ARC]
GSM8K = [
    dict(question="None?", answer="Five.\n#### 5"),
    dict(question="One?", answer="2*3=<<2*3=6>>6\n#### 6"),
    dict(question="No equals?", answer="<<a>>\n#### 1"),
    dict(question="Two?", answer="<<1=1=1>>1,000 <<5,000-1=4,999>>4,999\n#### 4,999"),
    dict(question="Below?", answer="<<1-3=-2>>-2\n#### -2"),
]


def _say(role, content):
    return dict(role=role, content=content)


SMOLTALK = [
    [_say("user", "a"), _say("assistant", "b")],
    [_say("system", "s"), _say("user", "a"), _say("assistant", "b")],
    [_say("user", "a"), _say("assistant", "b"), _say("user", "c")],
    [_say("user", ""), _say("assistant", "")],
    [_say("user", "a"), _say("assistant", "b"), _say("user", "c"), _say("assistant", "d")],
]


def _parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def _jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


def _read(kind, source, split="train"):
    opened = sets.OpenedSet(SetSpec(split, kind, kind, source))
    assert opened.count() == 5
    rows = [sets.conversation(kind, row, place) for place, row in opened.rows()]
    return [[message["content"] for message in row["messages"]] for row in rows]


def _prompt(row, letters):
    lines = [f"- {c}={x}" for c, x in zip(row["choices"], letters, strict=True)]
    return PROMPT.format(row["question"], "\n".join(lines))


@pytest.mark.parametrize("write", [_parquet, _jsonl])
@pytest.mark.parametrize("nested", [False, True])
def test_mmlu(tmp_path, write, nested, capsys):
    rows = [dict(train=row) for row in MMLU] if nested else MMLU
    contents = _read("mmlu", write(tmp_path / f"x.{write.__name__[1:]}", rows))
    assert contents == [[_prompt(row, "ABCD"), "ABCD"[row["answer"]]] for row in MMLU]
    assert "has 5 rows; the published set has 99,842" in capsys.readouterr().err


def test_mmlus_original_files(tmp_path):
    for subject, rows in (("b", MMLU[:2]), ("a", MMLU[2:])):
        lines = [
            ",".join(json.dumps(x, ensure_ascii=False) for x in (row["question"], *row["choices"]))
            + f",{'ABCD'[row['answer']]}"
            for row in rows
        ]
        text = "\n".join(lines).replace("\\n", "\n")
        (tmp_path / f"{subject}_test.csv").write_text(text)
    contents = _read("mmlu", str(tmp_path), "validation")
    expected = [*MMLU[2:], *MMLU[:2]]  # files by name
    assert contents == [[_prompt(row, "ABCD"), "ABCD"[row["answer"]]] for row in expected]
    (tmp_path / "a_test.csv").write_text("Q,1,2,3,D\n")
    _refuses(
        "mmlu", tmp_path, "a_test.csv, row 1: has 5 cells; question, A, B, C, D and letter are 6"
    )


@pytest.mark.parametrize("original", [False, True])
def test_arc(tmp_path, original):
    """Letters are the row's own; their number varies."""
    rows = ARC
    if original:
        rows = [
            dict(
                question=dict(
                    stem=row["question"],
                    choices=[
                        dict(text=t, label=x) for t, x in zip(*row["choices"].values(), strict=True)
                    ],
                ),
                answerKey=row["answerKey"],
            )
            for row in ARC
        ]
    write = _jsonl if original else _parquet
    contents = _read("arc", write(tmp_path / f"x.{write.__name__[1:]}", rows))
    expected = [dict(question=r["question"], choices=r["choices"]["text"]) for r in ARC]
    labels = [row["choices"]["label"] for row in ARC]
    assert contents == [[_prompt(r, x), x[-1]] for r, x in zip(expected, labels, strict=True)]
    assert [answer for _, answer in contents] == ["D", "4", "C", "E", "5"]


def test_gsm8k(tmp_path):
    contents = _read("gsm8k", _parquet(tmp_path / "x.parquet", GSM8K))
    assert [question for question, _ in contents] == [row["question"] for row in GSM8K]
    short = dict(text="t", python="p", python_output="o")
    parts = [[(short[p["type"]], p["text"]) for p in answer] for _, answer in contents]
    assert parts == [
        [("t", "Five.\n#### 5")],
        [("t", "2*3="), ("p", "2*3"), ("o", "6"), ("t", "6\n#### 6")],
        [("t", ""), ("p", "a"), ("o", ""), ("t", "\n#### 1")],
        [
            *(("t", ""), ("p", "1=1"), ("o", "1"), ("t", "1,000 ")),
            *(("p", "5,000-1"), ("o", "4,999"), ("t", "4,999\n#### 4,999")),
        ],
        [("t", ""), ("p", "1-3"), ("o", "-2"), ("t", "-2\n#### -2")],
    ]


@pytest.mark.parametrize("write", [_parquet, _jsonl])
def test_smoltalk(tmp_path, write):
    rows = [dict(messages=messages, source="x") for messages in SMOLTALK]
    contents = _read("smoltalk", write(tmp_path / f"x.{write.__name__[1:]}", rows))
    assert contents == [[m["content"] for m in messages] for messages in SMOLTALK]


NAN = float("nan")
A_OR_B = dict(question="Q", choices=["a", "b"], answer=0)
NO_ROWS = [
    ("smoltalk", dict(text="a"), "has no messages; it has text"),
    ("mmlu", A_OR_B | dict(choices=["a"]), "has 1 choices; must be 2 to 26"),
    ("mmlu", A_OR_B | dict(answer=2), "answer = 2 must be 0 to 1"),
    ("mmlu", A_OR_B | dict(answer=None), "answer = None must be 0 to 1"),
    ("mmlu", A_OR_B | dict(choices="ab"), "choices must be a list"),
    ("mmlu", A_OR_B | dict(choices=None), "choices must be a list"),
    ("mmlu", A_OR_B | dict(choices=["a", None]), "a choice must be text or a number, not None"),
    ("mmlu", A_OR_B | dict(question=None), "question must be text, not NoneType"),
    ("mmlu", dict(choices=["a", "b"], answer=0), "has no question"),
    ("arc", ARC[0] | dict(answerKey="E"), "answerKey = 'E' is not among the labels"),
    ("arc", ARC[0] | dict(answerKey=None), "answerKey = None is not among the labels"),
    ("arc", ARC[0] | dict(choices=dict(text=["a", "b"], label=None)), "choices must be a list"),
    ("arc", ARC[0] | dict(choices=None), "must be an object with text, label, not None"),
    ("gsm8k", dict(question="Q", answer=7), "answer must be text, not int"),
    ("gsm8k", dict(question="Q", answer=None), "answer must be text, not NoneType"),
]
NO_JSON = [
    ("mmlu", A_OR_B | dict(choices=["a", NAN]), "is not JSON: NaN is not a JSON number"),
    (
        "mmlu",
        A_OR_B | dict(choices=["a", float("inf")]),
        "is not JSON: Infinity is not a JSON number",
    ),
    ("mmlu", A_OR_B | dict(choices=["a", ["b"]]), "a choice must be text or a number"),
    ("arc", dict(question=dict(stem="Q", choices=None), answerKey="A"), "choices must be a list"),
    ("gsm8k", dict(question="Q", answer="\ud83d"), "is not JSON: has a lone surrogate"),
    ("smoltalk", [SMOLTALK[0]], "must be an object, not list"),
]


def _refuses(kind, path, message):
    with pytest.raises(DataError, match=message):
        for place, row in sets.OpenedSet(SetSpec("train", kind, kind, str(path))).rows():
            sets.conversation(kind, row, place)


def test_a_row_of_another_kind_is_told_with_file_and_row(tmp_path):
    """Covers JSON lines and Parquet, and values that only JSON can hold."""
    good = dict(smoltalk=dict(messages=[]), mmlu=MMLU[0], arc=ARC[0], gsm8k=GSM8K[0])
    for kind, row, message in (*NO_ROWS, *NO_JSON):
        path = _jsonl(tmp_path / "x.jsonl", [good[kind], row])
        _refuses(kind, path, rf"x.jsonl, line 3:? {message}")
    for kind, row, message in NO_ROWS:
        _refuses(kind, _parquet(tmp_path / "x.parquet", [row]), rf"x.parquet, row 1: {message}")
    number = dict(question="Q", choices=[1.0, NAN], answer=0)
    _refuses("mmlu", _parquet(tmp_path / "x.parquet", [number]), "row 1: a choice .* not nan")
    twice = '{"question": "Q", "answer": "1", "in": {"a": 1, "a": 2}}'
    (tmp_path / "x.jsonl").write_text(twice)
    _refuses("gsm8k", tmp_path / "x.jsonl", "line 1 is not JSON: the key 'a' occurs twice")


def test_rows_are_the_same_in_every_type_of_parquet(tmp_path):
    """Messages about bad UTF-8 and about duplicate columns name file and row."""
    path = tmp_path / "x.parquet"
    texts = pa.array([row["question"] for row in GSM8K]), pa.array([r["answer"] for r in GSM8K])
    for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()):
        message = pa.struct([("role", kind), ("content", kind)])
        tables = [pa.table({"messages": pa.array([x], pa.list_(message))}) for x in SMOLTALK]
        with pq.ParquetWriter(path, tables[0].schema, compression="zstd") as writer:
            for table in tables:  # one by one: pyarrow does not write more views
                writer.write_table(table)
        contents = _read("smoltalk", str(path))
        assert contents == [[m["content"] for m in messages] for messages in SMOLTALK]
    bad = pa.array([b"a"] * 4 + [b"b\xe9"]).view(pa.string())  # as some writers leave it
    pq.write_table(pa.table({"question": texts[0], "answer": bad}), path)
    _refuses("gsm8k", path, "x.parquet, row 5: 'answer' is not UTF-8")
    choices = pa.ListArray.from_arrays([0, 2, 4, 6, 8, 10], pa.concat_arrays([texts[0], bad]))
    columns = {"question": texts[0], "choices": choices, "answer": [0] * 5}
    pq.write_table(pa.table(columns), path)
    _refuses("mmlu", path, "x.parquet, row 5: 'choices' is not UTF-8")
    pq.write_table(pa.table([*texts, bad], names=["question", "answer", "answer"]), path)
    _refuses("gsm8k", path, "x.parquet has 2 columns named 'answer'")


def test_what_is_not_there_is_told_with_what_to_fetch(tmp_path):
    def open_set(source, **keys):
        return sets.OpenedSet(SetSpec("train", "mmlu", "mmlu", source, **keys))

    hint = (
        r"download the folders auxiliary_train/ and all/ of https://\S+/cais/mmlu to ~/data/mmlu/"
    )
    for source in (tmp_path / "none", tmp_path / "*.parquet", tmp_path):
        with pytest.raises(MissingDataError, match=f"mmlu = .*matches no file: {hint}"):
            open_set(str(source))
    for i in (0, 1, 3):
        _parquet(tmp_path / f"train-{i:05}-of-00004.parquet", MMLU)
    message = f"1 of 4 shards are missing in {tmp_path}, the first is train-00002-of-.*{hint}"
    with pytest.raises(MissingDataError, match=message):
        open_set(f"{tmp_path}/train-*.parquet")
    _parquet(tmp_path / "train-00002-of-00004.parquet", MMLU)
    assert open_set(str(tmp_path)).count() == 20
    with pytest.raises(DataError, match=f"#0:21'.*has 20 rows, and 21 are needed: {hint}"):
        open_set(str(tmp_path), stop=21).count()
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"x.txt ends in none of .jsonl"):
        open_set(f"{tmp_path}/*.txt")


def test_tfds(tmp_path, monkeypatch):
    """Class labels become names, bytes become text; unprepared data sets are refused."""
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        dict(
            question=tfds.features.Text(),
            choices=tfds.features.Sequence(
                dict(text=tfds.features.Text(), label=tfds.features.ClassLabel(names=[*"ABCDE"]))
            ),
            answerKey=tfds.features.ClassLabel(names=[*"ABCDE"]),
        )
    )

    class Arc(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        name = "kvjax_arc"

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            rows = [row for row in ARC if row["choices"]["label"][0] == "A"]
            return dict(train=((row["id"], _without_id(row)) for row in rows))

        def _generate_examples(self):
            raise NotImplementedError

    Arc(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    opened = sets.OpenedSet(SetSpec("train", "arc", "arc", "tfds:kvjax_arc"))
    rows = [sets.conversation("arc", row, place) for place, row in opened.rows()]
    assert sorted(row["messages"][1]["content"] for row in rows) == ["C", "D", "E"]
    assert opened.count() == 3 and "kvjax_arc" in opened.digest()
    same = sets.OpenedSet(SetSpec("validation", "arc", "arc", "tfds:kvjax_arc#train"))
    assert same.identity == opened.identity and same.spec.source != opened.spec.source
    with pytest.raises(DataError, match="arc = .*shares rows with .*arc = "):
        prepare._check_disjoint(dict(train=[opened], validation=[same]))
    with pytest.raises(DataError, match="mixture.arc = .*has no split 'test'; it has train"):
        sets.OpenedSet(SetSpec("train", "arc", "arc", "tfds:kvjax_arc#test"))
    with pytest.raises(DataError, match="mixture.arc = 'tfds:none': tfds:none cannot be opened"):
        sets.OpenedSet(SetSpec("train", "arc", "arc", "tfds:none"))


def test_examples_that_cannot_be_read_are_told_with_their_number(monkeypatch):
    """TFDS may raise any exception; text comes as bytes, alone or in arrays."""

    class Examples(list):
        def __getitem__(self, i):
            if isinstance(example := super().__getitem__(i), Exception):
                raise example
            return example

    text = dict(
        question=b"\xc3\xa9", answer=np.array(b"5"), number=np.int32(3), more=np.array([b"a"])
    )
    rows = Examples([text, OSError(5, "I/O\nand more"), dict(question=b"\xff")])
    info = types.SimpleNamespace(splits={"train": None}, features=dict.fromkeys(text))
    builder = types.SimpleNamespace(info=info, as_data_source=lambda split: {"train": rows}[split])
    monkeypatch.setattr(sets.tfds_sets, "builder", lambda name: builder)
    opened = sets.OpenedSet(SetSpec("train", "gsm8k", "gsm8k", "tfds:x"))
    assert next(opened.rows()) == (
        "tfds:x, example 0",
        dict(question="\u00e9", answer="5", number=3, more=["a"]),
    )
    with pytest.raises(DataError, match="^tfds:x, example 1 cannot be read: .*I/O"):
        list(opened.rows())
    rows[1] = rows[0]
    with pytest.raises(DataError, match="^tfds:x, example 2 is not UTF-8: "):
        list(opened.rows())


def _without_id(row):
    choices = [dict(text=t, label=x) for t, x in zip(*row["choices"].values(), strict=True)]
    return dict(question=row["question"], choices=choices, answerKey=row["answerKey"])


ROWS = {
    "smoltalk": ([460_341], [24_229]),
    "mmlu": ([99_842], [14_042]),
    "gsm8k": ([7_473], [1_319]),
    "arc": ([2_251, 1_119], [2_376, 1_172]),
}


def test_a_split_with_another_number_of_rows_than_the_published_one_warns(
    tmp_path, monkeypatch, capsys
):
    path = _jsonl(tmp_path / "x.jsonl", GSM8K)
    for kind, counts in ROWS.items():
        for split, known in zip(("train", "validation"), counts, strict=True):
            opened = sets.OpenedSet(SetSpec(split, kind, kind, path))
            for rows in (*known, known[0] + 1):
                monkeypatch.setattr(sets.records, "count", lambda file, rows=rows: rows)
                assert opened.count() == rows
                numbers = " or ".join(f"{number:,}" for number in known)
                warning = f"has {rows:,} rows; the published set has {numbers}\n"
                err = capsys.readouterr().err
                assert err.endswith(warning) if rows == known[0] + 1 else not err
    spec = SetSpec("train", "conversations", "conversations", path)
    monkeypatch.setattr(sets.records, "count", lambda file: 5)
    assert sets.OpenedSet(spec).count() == 5 and not capsys.readouterr().err
    for start, stop, wanted in ((0, 6, "6"), (5, None, "more than 5")):
        with pytest.raises(DataError, match=rf"has 5 rows, and {wanted} are needed: give a fi"):
            sets.OpenedSet(spec._replace(start=start, stop=stop)).count()


def test_conversations_that_are_made_up_stay_the_same():
    """Otherwise runs of the demo would not be comparable."""
    opened = sets.OpenedSet(SetSpec("train", "conversations", "conversations", "embedded"))
    digest = "25dc477fcd089ece5eb096dfb54fbcd54e705efd2b826a43d172d631a3e02349"
    assert opened.fingerprint() == opened.digest() == digest
    rows = list(opened.rows())
    assert opened.count() == len(rows) == 500 and rows[7][0] == "embedded conversation 7"
