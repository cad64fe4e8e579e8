"""Rows of a mixture are a function of files, seed and tokenizer, in nanochat's order."""

import dataclasses
import hashlib
import itertools
import json
import lzma
import random
import shutil
import types

import numpy as np
import pytest

from kvjax.conversation import mixture as mixture_lib, packing, prepare, rendered, synthetic
from kvjax.conversation.mixture import MixtureConfig
from kvjax.conversation.render import Renderer
from kvjax.data import loader, tokenizer as tokenizer_lib
from kvjax.data.config import DataConfig
from kvjax.foundation.errors import DataError, UserError

T = 40
TOKENIZER = tokenizer_lib.byte_tokenizer().with_specials(tokenizer_lib.CONVERSATION_SPECIALS)
# numpy.random.default_rng(42).permutation(n): what Hugging Face's shuffle(seed=42) does.
FIRST_TEN = {
    1319: [30, 754, 429, 1010, 1284, 953, 751, 954, 705, 993],
    14042: [1469, 122, 5555, 7550, 10165, 13363, 1796, 7277, 11347, 6650],
}


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def rows():
    """Returns conversations, and questions of GSM8K and MMLU, by file."""
    rng = random.Random(1)
    gsm8k = [dict(question=f"{i}?", answer=f"<<{i}+1={i + 1}>>{i + 1}") for i in range(12)]
    mmlu = [dict(question=f"{i}?", choices=[*"abcd"], answer=i % 4) for i in range(9)]
    return dict(talk=[synthetic.letter(rng) for _ in range(20)], gsm8k=gsm8k, mmlu=mmlu)


@pytest.fixture
def mixture(tmp_path, rows):
    files = {name: _write(tmp_path / f"{name}.jsonl", contents) for name, contents in rows.items()}
    return MixtureConfig(
        smoltalk=files["talk"] + "#0:16",
        mmlu=files["mmlu"],
        gsm8k=files["gsm8k"] + "#2:",
        validation_smoltalk=files["talk"] + "#16:",
        validation_gsm8k=files["gsm8k"] + "#:2",
    )


def _data(tmp_path, **keys):
    values = dict(source="mixture", tokenizer="byte", directory=str(tmp_path / "out"))
    return DataConfig(**values | dict(sequence_length=T) | keys)


def _open(mixture, data):
    return loader.open_dataset(prepare.prepare(mixture, data, TOKENIZER, shown=False))


def _expected(rows, split, seed=42):
    """Returns ids and masks of a split's conversations in order, computed independently."""
    from kvjax.conversation import sets

    ranges = dict(
        train=[("smoltalk", "talk", 0, 16), ("mmlu", "mmlu", 0, 9), ("gsm8k", "gsm8k", 2, 12)],
        validation=[("smoltalk", "talk", 16, 20), ("gsm8k", "gsm8k", 0, 2)],
    )[split]
    sets_chosen = []
    for kind, name, start, stop in ranges:
        order = np.random.default_rng(seed).permutation(len(rows[name]))
        chosen = [rows[name][i] for i in order][start:stop]
        sets_chosen.append([sets.conversation(kind, row, "") for row in chosen])
    pairs = [(i, j) for i, chosen in enumerate(sets_chosen) for j in range(len(chosen))]
    random.Random(seed).shuffle(pairs)
    renderer = Renderer(TOKENIZER)
    return [renderer(sets_chosen[i][j])[:2] for i, j in pairs]


def _all(dataset, split, name="tokens"):
    rows = dataset.rows(split)
    return np.stack([row[name] for row in rows.__getitems__(range(len(rows)))])


@pytest.mark.parametrize("count", FIRST_TEN)
def test_sets_are_shuffled_as_hugging_face_does(count):
    assert mixture_lib.shuffled(count, 42)[:10].tolist() == FIRST_TEN[count]


def test_sets_are_mixed_as_nanochat_does():
    assert mixture_lib.mixed([5, 3, 2], 42)[:6] == [(1, 2), (0, 3), (0, 2), (2, 0), (1, 0), (1, 1)]


def test_rows_are_one_stream_that_overlaps_by_a_token(tmp_path, mixture, rows):
    dataset = _open(mixture, _data(tmp_path))
    for split, fill in dict(train=None, validation=256).items():
        stream = [i for ids, _ in _expected(rows, split) for i in ids]
        num_rows = (len(stream) - 1) // T
        expected = [stream[i * T : i * T + T + 1] for i in range(num_rows)]
        if fill is not None:
            tail = stream[num_rows * T :]
            expected.append(tail + [fill] * (T + 1 - len(tail)))
        assert _all(dataset, split).tolist() == expected and len(expected) > 5
    info = dataset.info["splits"]["train"]
    sets = {each["key"]: (each["rows"], each["read"]) for each in info["sets"]}
    assert sets == dict(smoltalk=(20, 16), mmlu=(9, 9), gsm8k=(12, 10))
    assert not dataset.is_masked
    sha256 = hashlib.sha256(TOKENIZER.to_json().encode()).hexdigest()
    info = {key: dataset.info[key] for key in ("format_version", "masked", "tokenizer", "dtype")}
    assert info == dict(
        format_version=1,
        masked=False,
        tokenizer=dict(vocab_size=265, bos_id=256, sha256=sha256),
        dtype="uint16",
    )
    assert dataset.info["mixture"] == json.loads(json.dumps(dataclasses.asdict(mixture)))
    for split, documents in dict(train=35, validation=6).items():
        info, expected = dataset.info["splits"][split], _expected(rows, split)
        ids = [i for ids, _ in expected for i in ids]
        assert info["documents"] == documents and info["filling"] == 0
        assert (info["tokens"], info["bytes"]) == (len(ids), sum(i < 256 for i in ids))
        sums = [
            sum(each[key] for each in info["sets"]) for key in ("tokens", "trained", "rejected")
        ]
        assert sums == [len(ids), sum(sum(mask) for _, mask in expected), 0]


def test_the_same_files_seed_and_tokenizer_give_the_same_rows(tmp_path, mixture, rows):
    """They do in another folder, too; changed ones give other rows."""
    data = _data(tmp_path)
    first = _open(mixture, data)
    assert _open(mixture, data).path == first.path
    other = tmp_path / "other"
    other.mkdir()
    moved = {}
    for key, value in dataclasses.asdict(mixture).items():
        moved[key] = value.replace(f"{tmp_path}/", f"{other}/") if isinstance(value, str) else value
    for name in rows:
        shutil.copy(tmp_path / f"{name}.jsonl", other)
    copied = _open(MixtureConfig(**moved), _data(other))
    assert copied.path.name == first.path.name and copied.digest == first.digest
    assert [path.read_bytes() for path in sorted(copied.path.glob("packed_rows/*/*-train*"))] == [
        path.read_bytes() for path in sorted(first.path.glob("packed_rows/*/*-train*"))
    ]
    changed = [dict(seed=1), dict(order=mixture.order[::-1]), dict(limit=20), dict(mmlu="")]
    for keys in changed:
        assert _open(dataclasses.replace(mixture, **keys), data).digest != first.digest
    _write(tmp_path / "gsm8k.jsonl", rows["gsm8k"][::-1])
    assert _open(mixture, data).digest != first.digest


def test_what_the_assistant_says_counts(tmp_path, mixture, rows):
    dataset = _open(dataclasses.replace(mixture, loss="assistant"), _data(tmp_path))
    assert dataset.is_masked
    expected = _expected(rows, "train")
    tokens, mask = ([x for pair in expected for x in pair[i]] for i in range(2))
    for name, stream in dict(tokens=tokens, mask=mask).items():
        for i, row in enumerate(_all(dataset, "train", name)):
            assert row.tolist() == stream[i * T : i * T + T + 1]
    assert _all(dataset, "validation", "mask")[-1, -1] == 0  # padding
    assert dataset.digest != _open(mixture, _data(tmp_path)).digest


@pytest.mark.parametrize("loss", ["all", "assistant"])
@pytest.mark.parametrize("pack", ["whole", "single"])
def test_whole_conversations_in_a_row(tmp_path, mixture, rows, pack, loss):
    """Each conversation is written once, uncut if it fits; padding has loss 0."""
    length = 260
    changed = dataclasses.replace(mixture, pack=pack, loss=loss)
    dataset = _open(changed, _data(tmp_path, sequence_length=length))
    expected = [(ids[: length + 1], mask[: length + 1]) for ids, mask in _expected(rows, "train")]
    pieces = []
    tokens, masks = _all(dataset, "train"), _all(dataset, "train", "mask")
    for row, mask in zip(tokens.tolist(), masks.tolist(), strict=True):
        starts = [i for i, token in enumerate(row) if token == 256] + [len(row)]
        for start, stop in itertools.pairwise(starts):
            pieces.append((row[start:stop], mask[start:stop]))
    padding = [mask for ids, mask in pieces if len(ids) == 1]
    assert all(mask == [0] for mask in padding)
    conversations = [(ids, mask) for ids, mask in pieces if len(ids) > 1]
    if loss == "all":
        expected = [(ids, [1] * len(ids)) for ids, _ in expected]
    assert sorted(conversations) == sorted(expected)
    if pack == "single":
        assert conversations == expected
    else:
        assert len(tokens) < 0.8 * len(expected)
    info = dataset.info["splits"]["train"]
    assert info["filling"] == len(padding) and info["rows"] == len(tokens)


def test_the_best_fit_is_the_largest_that_fits():
    written = []

    class Writer:
        def add_row(self, ids, mask):
            written.append((ids.tolist(), mask.tolist()))

    sizes = [5, 3, 4, 2, 6, 1]
    padding = packing.write_whole(
        Writer(),
        ((np.full(n, n, np.uint16), np.ones(n, np.uint8)) for n in sizes),
        row_length=8,
        fill=0,
    )
    rows = [sorted(set(ids), key=ids.index) for ids, _ in written]
    assert rows == [[5, 3], [4, 2, 1, 0], [6, 0]] and padding == 3
    assert [sum(mask) for _, mask in written] == [8, 7, 6]


def test_rows_that_are_no_conversation(tmp_path, mixture, rows):
    """They raise an error with file and row, or are listed with skip_broken."""
    path = tmp_path / "gsm8k.jsonl"
    _write(path, [*rows["gsm8k"][:5], dict(question="?"), *rows["gsm8k"][6:]])
    message = "gsm8k.jsonl, line 6: has no answer.*config.mixture.skip_broken=True skips such rows"
    with pytest.raises(DataError, match=message):
        _open(mixture, _data(tmp_path))
    assert not list((tmp_path / "out" / "datasets").iterdir())
    talk = [*rows["talk"]]
    talk[3] = dict(messages=2 * talk[3]["messages"][:1])
    _write(tmp_path / "talk.jsonl", talk)
    dataset = _open(dataclasses.replace(mixture, skip_broken=True), _data(tmp_path))
    rejected = {
        each["key"]: each["first_rejected"]
        for split in ("train", "validation")
        for each in dataset.info["splits"][split]["sets"]
        if each["rejected"]
    }
    assert sum(map(len, rejected.values())) == 2
    assert any("line 6: has no answer" in m for m in rejected.get("gsm8k", ["", ""]))
    messages = rejected.get("smoltalk") or rejected.get("validation_smoltalk")
    assert "line 4: roles must alternate" in messages[0]
    documents = sum(dataset.info["splits"][s]["documents"] for s in ("train", "validation"))
    assert documents == 20 + 9 + 12 - 2


def test_a_set_is_rendered_in_batches_and_its_files_stay_as_they_are(mixture, monkeypatch):
    """Conversations come in the given order; progress is reported after each batch but the last."""
    talk = [dict(messages=[dict(role="user", content=c * n)]) for n, c in enumerate("abcd", 3)]
    rows = [("line 1", 7), *((f"line {i}", conversation) for i, conversation in enumerate(talk, 2))]
    spec = mixture_lib.SetSpec("train", "conversations", "conversations", "x.jsonl")
    opened = types.SimpleNamespace(spec=spec, rows=lambda: iter(rows))
    talk[0]["messages"].append(dict(role="assistant", content="Z"))
    monkeypatch.setattr(rendered, "BATCH_CHARACTERS", len(f"{talk[0]}{talk[1]}"))
    order, reports, renderer = np.array([4, 0, 2, 1]), [], Renderer(TOKENIZER)
    compressor = rendered.Compressor()

    def read(count, skip_broken=True, order=order, compressor=None):
        counts = rendered.SetCounts("conversations", "x.jsonl", "", count)
        config = dataclasses.replace(mixture, skip_broken=skip_broken)
        options = (renderer, 8, np.uint16, compressor, reports.append)
        return rendered.RenderedSet(opened, order, counts, config, *options)

    rendered_set = read(5, compressor=compressor)
    assert reports == ["conversations 3 of 4"]
    assert len(rendered_set) == 4 and rendered_set[1] is None
    for index, i in ((0, 4), (2, 2), (3, 1)):
        expected = renderer(rows[i][1], limit=8)
        ids, mask = rendered_set[index]
        assert (ids.tolist(), mask.tolist()) == (expected.ids, expected.mask)
        assert (ids.dtype, mask.dtype) == (np.uint16, np.uint8)
    message = "line 1: must be an object with messages, not 7"
    assert dataclasses.asdict(rendered_set.counts) == dict(
        key="conversations",
        source="x.jsonl",
        sha256="",
        rows=5,
        read=4,
        cut=2,
        rejected=1,
        tokens=23,
        trained=1,
        first_rejected=[message],
    )
    text = b"aaaZbbbbdddddd"
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    assert compressor.bits_per_byte() == 8 * len(packed) / len(text)
    assert rendered.Compressor().bits_per_byte() == 8 * len(lzma.compress(b""))
    with pytest.raises(DataError, match=f"^{message}. config.mixture.skip_broken=True skips such"):
        read(5, skip_broken=False)
    where = "^config.mixture.conversations = 'x.jsonl': its files"
    with pytest.raises(DataError, match=f"{where} grew while they were read"):
        read(4, order=np.array([0]))
    with pytest.raises(DataError, match=f"{where} shrank while they were read"):
        read(6, order=np.array([5, 4]))


def test_too_few_conversations_for_a_row(tmp_path, mixture):
    with pytest.raises(DataError, match=r"sequence_length = 99999: the train split"):
        _open(mixture, _data(tmp_path, sequence_length=99999))


def test_validation_is_not_trained_on(tmp_path, mixture):
    path = mixture.smoltalk.partition("#")[0]
    for rows in ("", "#15:", "#0:1"):
        changed = dataclasses.replace(mixture, validation_smoltalk=path + rows)
        with pytest.raises(
            DataError, match="validation_smoltalk = .*shares rows with .*mixture.sm"
        ):
            _open(changed, _data(tmp_path))
    changed = dataclasses.replace(mixture, validation_smoltalk=f"{path[:-6]}*#16:")
    with pytest.raises(DataError, match="shares rows with"):
        _open(changed, _data(tmp_path))


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(smoltalk=""), "config.mixture: has no conversations for train: set one of smol"),
        (dict(validation_smoltalk=""), "has no conversations for validation: .*validation_mmlu"),
        (dict(smoltalk="a#5:5"), r"config.mixture.smoltalk = 'a#5:5': must be SOURCE#START:STOP"),
        (dict(smoltalk="#1:5"), "config.mixture.smoltalk = '#1:5': must be SOURCE#START:STOP"),
        (
            dict(smoltalk="hdfs://a"),
            "config.mixture.smoltalk = 'hdfs://a': hdfs:// is not supported",
        ),
        (dict(order=("smoltalk",)), r"config.mixture.order = \('smoltalk',\): must name each of"),
        (dict(seed=-1), "config.mixture.seed = -1"),
        (dict(limit=1), "config.mixture.limit = 1: must be at least 2"),
        (dict(loss="user"), "config.mixture.loss = 'user': must be one of 'all', 'assistant'"),
        (dict(pack="best"), "config.mixture.pack = 'best': must be one of 'stream', 'whole', 'sin"),
    ],
)
def test_values_that_cannot_be(keys, message):
    with pytest.raises(UserError, match=message):
        MixtureConfig(**dict(smoltalk="a", validation_smoltalk="b") | keys)


def test_letters_that_are_other_tokens_in_a_question_are_told(tmp_path, mixture, capsys):
    texts = ["a=A b=B c=C d=D e=E " * 9, "- x=A\n- y=B\n- z=C\n- w=D\n- v=E\n" * 9]
    trained = tokenizer_lib.train(texts, 274, tokenizer_lib.CONVERSATION_SPECIALS)
    prepare.prepare(mixture, _data(tmp_path), trained, shown=False)
    assert "A, B, C, D, E: another token in a question" in capsys.readouterr().err
    _open(mixture, _data(tmp_path))
    assert "otherwise in a question" not in capsys.readouterr().err
