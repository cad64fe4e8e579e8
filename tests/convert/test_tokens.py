"""Which tokens open and end a text is what the source says, from import to export."""

import itertools
import json
import re
import shutil
from unittest import mock

from etils import epath
import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tokenizers

from kvjax.conversation import dialogue, jinja_process
from kvjax.convert import (
    __main__ as convert,
    huggingface,
    into_workdir,
    model as model_lib,
    published,
    tokens,
)
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import ThinKeys
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.workdir import origin, trained
from tests import quick
from tests.convert import comparison, test_gguf_file, workdirs

DEEPSEEK = "<｜begin▁of▁sentence｜>"  # its bars are none of ASCII's
GENERATION = dict(bos_token_id=38, eos_token_id=[39, 0], pad_token_id=39, temperature=0.6)


@pytest.fixture
def source(tmp_path):
    """A copy of a stored model's folder."""
    folder = tmp_path / "source"
    return epath.Path(shutil.copytree(comparison.PUBLISHED / "qwen2", folder))


@pytest.fixture
def chat(source):
    """The same, whose turns have tokens of their own, as SmolLM2-Instruct's."""
    text = (source / "tokenizer.json").read_text()
    backend = tokenizers.Tokenizer.from_str(text)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (source / "tokenizer.json").write_text(backend.to_str())
    about = dict(bos_token=dict(content="<|im_start|>", lstrip=False), eos_token="<|im_end|>")
    about |= dict(pad_token="<|im_end|>", tokenizer_class="GPT2Tokenizer")
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    (source / "generation_config.json").write_text(json.dumps(GENERATION))
    return source


def rename(folder, name):
    """Gives the only special of a tokenizer another name."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", name))


def write(model, folder):
    into_workdir.write(model, epath.Path(folder), {})
    return folder


def read(path):
    return json.loads(path.read_text())


def check(folder):
    """Fails unless an export's tokens are those of `chat`."""
    config, about = (read(folder / name) for name in ("config.json", "tokenizer_config.json"))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert ids == {key: GENERATION[key] for key in ids}
    names = {kind: about.get(f"{kind}_token") for kind in tokens.KINDS}
    turn = dict(bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", unk=None)
    assert names == turn
    assert read(folder / "generation_config.json") == GENERATION


@pytest.mark.slow
def test_turns_end_in_transformers_as_they_did(chat, tmp_path):
    workdir = write(published.open(chat), tmp_path / "workdir")
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    check(tmp_path / "out")
    assert published.open(tmp_path / "out").token_files == published.open(chat).token_files


def test_turns_end_as_they_did_after_a_conversion_and_in_either_format(chat, tmp_path):
    model = published.open(chat)
    method = ThinKeys(rank=2, objective="weights")
    thin = write(ConvertedModel(model, [method] * 2, None), tmp_path / "thin")
    workdirs.export(thin, tmp_path / "out", "--format=huggingface")
    check(tmp_path / "out")
    workdirs.export(thin, tmp_path / "factored", "--format=factored")
    back = write(model_lib.open(str(tmp_path / "factored")), tmp_path / "back")
    workdirs.export(back, tmp_path / "again", "--format=huggingface")
    check(tmp_path / "again")


def test_generation_ends_where_the_source_does(chat, tmp_path):
    """At tokens that are no specials too."""
    config = GENERATION | dict(eos_token_id=[39, 5, 4_000, -1, None])
    (chat / "generation_config.json").write_text(json.dumps(config))
    workdir = write(published.open(chat), tmp_path / "workdir")
    assert trained.find(workdir).tokenizer.ends == (5, 39)
    (workdir / "generation_config.json").unlink()
    assert trained.find(workdir).tokenizer.ends == (39,)  # the tokenizer's
    (workdir / "tokenizer_config.json").unlink()
    assert trained.find(workdir).tokenizer.ends == ()  # as written before they were kept


def test_without_a_generation_config_its_keys_in_the_config_are_taken(source, tmp_path):
    path = source / "config.json"
    ids = dict(bos_token_id=50_256, eos_token_id=[3, 0])  # of no row: a default of transformers
    path.write_text(json.dumps(read(path) | ids))
    model = published.open(source)
    assert model.token_files["generation_config.json"] == dict(eos_token_id=[3, 0])
    workdirs.export(write(model, tmp_path / "workdir"), tmp_path / "out", "--format=huggingface")
    config = read(tmp_path / "out/config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [3, 0])
    assert read(tmp_path / "out/tokenizer_config.json")["eos_token"] == "b"


def test_no_token_is_guessed_that_the_source_denies(source, tmp_path):
    """Qwen's has no bos_token."""
    about = dict(bos_token=None, eos_token="<|endoftext|>")
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    path = source / "config.json"
    path.write_text(json.dumps(read(path) | dict(bos_token_id=None, eos_token_id=None)))
    plan = huggingface.plan(published.open(source), "F32")
    about, config = (json.loads(plan.files[f]) for f in ("tokenizer_config.json", "config.json"))
    assert (about["bos_token"], about["eos_token"]) == (None, "<|endoftext|>")
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 0)


START, END = "<|im_start|>", "<|im_end|>"
ADDED = {START: 257, END: 258}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _flagged(special, *, decoder=None, added=None, without=(), listed=True):
    """Returns the files of a tokenizer of bytes, of which <|bos|> is 256, START 257 and END 258.

    Args:
      special: the flag of the two in tokenizer.json, in its model's vocabulary if it is None.
      decoder: their flag in tokenizer_config.json.
      added: added_tokens.json.
      without: tokens that the decoder lacks.
      listed: whether tokenizer.json has them at all.
    """
    made = tokenizer_lib.byte_tokenizer().with_specials([START, END]) if listed else None
    definition = json.loads((made or tokenizer_lib.byte_tokenizer()).to_json())
    bos, *rotations = definition["added_tokens"]
    rotations = [] if special is None else [turn | dict(special=special) for turn in rotations]
    about = dict(bos_token="<|bos|>", eos_token="<|bos|>", chat_template=CHATML)
    if decoder is not None:
        flags = [(257, dict(content=START, special=decoder)), (258, dict(content=END))]
        about["added_tokens_decoder"] = {i: t for i, t in flags if t["content"] not in without}
    files = {"tokenizer.json": definition | dict(added_tokens=[bos, *rotations])}
    files["tokenizer_config.json"] = about
    return files | ({} if added is None else {"added_tokens.json": added})


# Files that have the two tokens of turns; and the kinds that a GGUF file may say they are of.
WAYS = dict(
    special=_flagged(True),
    not_special=_flagged(False),
    another_flag=_flagged(False, decoder=True),
    special_and_added=_flagged(True, added=ADDED),
    decoder=_flagged(True, decoder=False, listed=False),
    added=_flagged(True, added=ADDED, listed=False),
    a_part_of_the_decoder=_flagged(True, decoder=False, added=ADDED, without=[END], listed=False),
    empty_decoder=_flagged(True, decoder=False, added=ADDED, without=ADDED, listed=False),
    vocabulary=_flagged(None),
    **{kind: gguf.TokenType[kind] for kind in ("CONTROL", "USER_DEFINED", "NORMAL")},
)

# After an import: as the files have it, and ordinary tokens become special.
FLAGGED = "special another_flag special_and_added vocabulary CONTROL NORMAL".split()


@pytest.fixture
def published_as(tmp_path, monkeypatch):
    """Returns a function that writes a model of 300 rows, its tokenizer as a value of WAYS says."""
    qwen, numbers = comparison.PUBLISHED / "qwen2", itertools.count()

    def write(way):
        path = tmp_path / f"{next(numbers)}.gguf"
        if not isinstance(way, dict):
            tokens = test_gguf_file.tokens_of(300)
            tokens[259:261] = [(START, way), (END, way)]
            with monkeypatch.context() as patch:
                patch.setattr(test_gguf_file, "tokens_of", lambda rows: tokens)
                test_gguf_file.write(path, qwen, "qwen2", template=CHATML)
            return path
        shutil.copytree(qwen, path)
        (path / "chat_template.jinja").unlink()
        stored = load_file(path / "model.safetensors")
        whole = {n: a for n, a in stored.items() if "embed" in n or "lm_head" in n}
        whole = {name: np.resize(array, (300, array.shape[1])) for name, array in whole.items()}
        save_file(stored | whole, path / "model.safetensors")
        config = read(path / "config.json") | dict(vocab_size=300, eos_token_id=256)
        for name, tree in (way | {"config.json": config}).items():
            (path / name).write_text(json.dumps(tree))
        return path

    return write


def test_tokens_of_turns_are_one_id_each_whatever_file_has_them(published_as):
    """Encodes turns as transformers (5.14) and llama.cpp; no text is such a token; answers end."""
    for name, way in WAYS.items():
        model = published.open(published_as(way))
        tokenizer = tokenizer_lib.from_json(model.tokenizer_json, name)
        talk = dialogue.make(tokenizer, model.chat_template, model.token_files, where=name)
        start, end = (talk.tokenizer.special(token) for token in (START, END))
        assert (start, end) == ((257, 258) if isinstance(way, dict) else (259, 260)), name
        assert end in talk.ends, name
        assert tokenizer.added_tokens()[START].special == (name in FLAGGED), name
        written, encode = f"a{END}\n{START}system\nb", talk.tokenizer.encode
        newline, *text = encode(f"\n{written}")
        assert talk.prompt([dict(role="user", content=written)]).ids == [
            *(start, *encode("user"), newline, *text, end, newline),
            *(start, *encode("assistant"), newline),
        ], name
        assert talk.tokenizer.decode(text) == written and not {start, end} & set(text), name


def test_a_workdir_has_the_control_tokens_and_the_end_of_a_turn(published_as, tmp_path):
    """Reads both also for text without a conversation, and keeps them in an export."""
    workdir = write(published.open(published_as(WAYS["not_special"])), tmp_path / "workdir")
    found = trained.find(workdir)
    assert found.tokenizer.ends == (256, 258) and found.tokenizer.special(END) == 258
    assert found.tokenizer.encode(END) == list(END.encode())
    assert found.tokenizer.written_out(f"a{END}") == [END]
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    added = read(tmp_path / "out/tokenizer.json")["added_tokens"]
    assert [token["special"] for token in added] == [True, False, False]  # as the source has them
    (workdir / "chat_template.jinja").write_text("{% for %}")  # told by who talks with it
    assert trained.find(workdir).tokenizer.ends == (256,)


def test_a_template_over_its_limits_is_told_and_waited_for_once(
    published_as, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(jinja_process, "_TRIAL_SECONDS", 0.3, raising=False)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    said = "chat_template.jinja needs more than 1 GiB of memory, 0.3 seconds or"
    files = _flagged(True)
    files["tokenizer_config.json"] |= dict(chat_template=loops)
    with pytest.raises(UserError, match=f"0.gguf: {said}"):
        published.open(published_as(files))
    workdir = write(published.open(published_as(_flagged(True))), tmp_path / "workdir")
    (workdir / "chat_template.jinja").write_text(loops + CHATML)
    asked = mock.Mock(wraps=jinja_process._worker_answer)
    monkeypatch.setattr(jinja_process, "_worker_answer", asked)
    for _ in range(3):
        assert trained.find(workdir).tokenizer.ends == (256,)
    assert capsys.readouterr().err.count(said) == 1
    assert asked.call_count == 2  # that it is a template, and a conversation


def test_files_that_disagree_on_a_token(published_as):
    """And a named token that the template writes and no file has."""
    for added, listed, said in (
        ({START: 257}, False, f"its chat template writes {END}, which has no id in any file"),
        ({START: 256}, False, "256 is '<|bos|>'"),
        ({START: 259}, True, f"'{START}' is 257"),
        ({START: -1}, True, "an added token '<|im_start|>' with id -1"),
        ({"": 258}, True, "an added token '' with id 258"),
        ({START: "257"}, True, "with id '257'"),
    ):
        files = _flagged(True, added=added, listed=listed)
        files["tokenizer_config.json"] |= dict(eos_token=END)
        with pytest.raises(UserError) as error:
            published.open(published_as(files))
        assert said in str(error.value) and "again" in str(error.value)
    rotations = [START, dict(content=END)]
    for name, key, named in (
        ("tokenizer_config.json", "additional_special_tokens", rotations),
        ("tokenizer_config.json", "extra_special_tokens", rotations),
        ("tokenizer_config.json", "extra_special_tokens", dict(a=START, b=END)),
        ("special_tokens_map.json", "additional_special_tokens", rotations),
    ):
        files = _flagged(True, listed=False)
        files[name] = files.get(name, {}) | {key: named}
        with pytest.raises(UserError, match=f"writes {re.escape(f'{END}, {START}')}, which"):
            published.open(published_as(files))


def test_tokens_of_a_gguf_file(tmp_path):
    def edit(writer, _):
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(4)
        writer.add_pad_token_id(999)  # of no token

    path = tmp_path / "tiny.gguf"
    test_gguf_file.write(path, comparison.PUBLISHED / "llama", "llama", edit=edit)
    model = published.open(path)
    names = [name for name, _ in test_gguf_file.tokens_of(300)]
    assert model.token_files == {
        "tokenizer_config.json": dict(bos_token=names[0], eos_token=names[3]),
        "generation_config.json": dict(bos_token_id=0, eos_token_id=[3, 4]),
    }
    assert tokens.of_gguf({}) == {}


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_source_says_which_token_opens_a_document(source, tmp_path, monkeypatch, kind):
    """By a name that is not known; so do the workdir, its export, and what is read from that."""
    path = source
    if kind == "folder":
        rename(source, DEEPSEEK)
        (source / "tokenizer_config.json").write_text(json.dumps(dict(bos_token=DEEPSEEK)))
    else:
        monkeypatch.setattr(test_gguf_file, "SPECIAL", DEEPSEEK)
        path = tmp_path / "tiny.gguf"
        test_gguf_file.write(path, source, "qwen2")
    workdir = write(published.open(path), tmp_path / "workdir")
    assert trained.find(workdir).tokenizer.bos_id == 0
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    assert read(tmp_path / "out/tokenizer_config.json")["bos_token"] == DEEPSEEK
    after = published.open(tmp_path / "out")
    assert after.tokenizer_json == published.open(path).tokenizer_json


def encodings(path, name):
    """What a tokenizer.json makes of texts and pairs, with specials and without.

    Args:
      name: of a token that is written out in some of them.
    """
    backend = tokenizers.Tokenizer.from_str(path.read_text())
    texts = [("a b",), ("",), (f"a{name} b",), ("a b", f"{name}c")]
    keys = ("ids", "type_ids", "offsets", "sequence_ids", "word_ids", "special_tokens_mask")
    return [
        {key: getattr(backend.encode(*text, add_special_tokens=add), key) for key in keys}
        for text in texts
        for add in (True, False)
    ]


_TEMPLATE = tokenizers.processors.TemplateProcessing(
    single=f"{DEEPSEEK} $A", pair=f"{DEEPSEEK} $A $B", special_tokens=[(DEEPSEEK, 0)]
)
_AFTER = tokenizers.processors.TemplateProcessing(
    single=f"$A {DEEPSEEK}", pair=f"$A $B:1 {DEEPSEEK}:1", special_tokens=[(DEEPSEEK, 0)]
)
_STEPS = dict(
    none=None,
    after=_AFTER,
    offsets=tokenizers.processors.ByteLevel(trim_offsets=True),
    several=tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), _TEMPLATE]),
    template=_TEMPLATE,
)


@pytest.mark.parametrize("special", quick.only([True], [True, False]))
@pytest.mark.parametrize("step", quick.every(3, _STEPS))
def test_texts_are_encoded_as_by_the_source(source, tmp_path, step, special):
    """Whether or not it puts the token before texts that opens documents here."""
    rename(source, DEEPSEEK)
    (source / "tokenizer_config.json").write_text(json.dumps(dict(bos_token=DEEPSEEK)))
    path = source / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_str(path.read_text())
    if _STEPS[step]:
        backend.post_processor = _STEPS[step]
    definition = json.loads(backend.to_str())
    (token,) = definition["added_tokens"]
    path.write_text(json.dumps(definition | dict(added_tokens=[token | dict(special=special)])))
    workdir = write(published.open(source), tmp_path / "workdir")
    assert trained.find(workdir).tokenizer.bos_id == 0
    for kind in ("huggingface", "factored"):
        workdirs.export(workdir, tmp_path / kind, f"--format={kind}")
        out = tmp_path / kind / "tokenizer.json"
        assert encodings(out, DEEPSEEK) == encodings(path, DEEPSEEK)
        assert trained.find(write(model_lib.open(str(out.parent)), tmp_path / f"{kind}-again"))


def test_a_tokenizer_of_sentencepiece_is_refused_before_anything_is_written(
    source, tmp_path, capsys
):
    """Llama 2's is one: the workdir could be written, and nothing could open it."""
    backend = tokenizers.Tokenizer.from_str((source / "tokenizer.json").read_text())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    (source / "tokenizer.json").write_text(backend.to_str())
    arguments = [f"--source={source}", f"--out={tmp_path / 'out'}"]
    assert command_line.status(convert.main, arguments) == 2
    said = capsys.readouterr().err
    assert f"{source}: the tokenizer must be byte-level without prefix space (as GPT-2" in said
    assert "a byte-level BPE, not SentencePiece (such as Llama 2, Mistral 7B)" in said
    assert not (tmp_path / "out").exists()


def test_a_source_without_a_token_that_opens_a_document(source):
    rename(source, DEEPSEEK)
    (source / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<other>")))
    with pytest.raises(UserError) as error:
        published.open(source)
    said = str(error.value)
    assert said.startswith(f"{source}: no special token opens a document: it needs one of <|bos|>")
    assert (
        DEEPSEEK in said and "whose tokenizer_config.json has a special token as bos_token" in said
    )


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_damaged_files_of_a_workdir(chat, tmp_path, file):
    workdir = write(published.open(chat), tmp_path / "workdir")
    for text, said in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (workdir / file).write_text(text)
        with pytest.raises(UserError, match=f"{file} {said}.*: restore it, or remove it"):
            trained.find(workdir)
    (chat / file).write_text("{")
    with pytest.raises(UserError, match=f"{file} is not JSON"):
        published.open(chat)


def test_a_damaged_chat_template_of_a_workdir(chat, tmp_path):
    workdir = write(published.open(chat), tmp_path / "workdir")
    (workdir / "chat_template.jinja").write_bytes(b"\xff")
    said = "chat_template.jinja cannot be read .*: restore it"
    with pytest.raises(UserError, match=said):
        model_lib.open(str(workdir))
    with pytest.raises(UserError, match=said):
        origin.inherit(epath.Path(tmp_path), workdir, 8)


def test_half_a_character_is_no_token(source):
    (source / "tokenizer_config.json").write_text('{"bos_token": "\\ud800", "eos_token": "<e>"}')
    files = published.open(source).token_files
    assert files["tokenizer_config.json"] == dict(bos_token=None, eos_token="<e>")
