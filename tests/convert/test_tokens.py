"""Tokens that open and end a text are the source's, from import to export."""

import json
import shutil

from etils import epath
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tokenizers

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
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.workdir import dialogue, origin, trained
from tests import quick, sentencepiece_files
from tests.convert import comparison, gguf_files, workdirs

DEEPSEEK = "<｜begin▁of▁sentence｜>"  # its bars are not ASCII
GENERATION = dict(bos_token_id=38, eos_token_id=[39, 0], pad_token_id=39, temperature=0.6)


@pytest.fixture
def source(tmp_path):
    """A copy of a stored model's folder."""
    folder = tmp_path / "source"
    return epath.Path(shutil.copytree(comparison.PUBLISHED / "qwen2", folder))


@pytest.fixture
def chat(source):
    """Returns the published copy with special tokens for turns, as SmolLM2-Instruct has."""
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
    """Renames the only special token of a tokenizer."""
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


def test_end_of_turn_survives_conversion_and_export(chat, tmp_path):
    model = published.open(chat)
    method = ThinKeys(rank=2, objective="weights")
    thin = write(ConvertedModel(model, [method] * 2, None), tmp_path / "thin")
    workdirs.export(thin, tmp_path / "out", "--format=huggingface")
    check(tmp_path / "out")
    assert published.open(tmp_path / "out").token_files == model.token_files
    workdirs.export(thin, tmp_path / "factored", "--format=factored")
    back = write(model_lib.open(str(tmp_path / "factored")), tmp_path / "back")
    workdirs.export(back, tmp_path / "again", "--format=huggingface")
    check(tmp_path / "again")


def test_end_tokens(chat, tmp_path):
    """End tokens need not be special."""
    config = GENERATION | dict(eos_token_id=[39, 5, 4_000, -1, None])
    (chat / "generation_config.json").write_text(json.dumps(config))
    workdir = write(published.open(chat), tmp_path / "workdir")
    assert trained.find(workdir).tokenizer.ends == (5, 39)
    (workdir / "generation_config.json").unlink()
    assert trained.find(workdir).tokenizer.ends == (39,)  # the tokenizer's
    (workdir / "tokenizer_config.json").unlink()
    assert trained.find(workdir).tokenizer.ends == ()  # as in workdirs of older versions


def test_token_ids_of_config_json(source, tmp_path):
    path = source / "config.json"
    ids = dict(bos_token_id=50_256, eos_token_id=[3, 0])  # 50256, transformers' default, has no row
    path.write_text(json.dumps(read(path) | ids))
    model = published.open(source)
    assert model.token_files["generation_config.json"] == dict(eos_token_id=[3, 0])
    workdirs.export(write(model, tmp_path / "workdir"), tmp_path / "out", "--format=huggingface")
    config = read(tmp_path / "out/config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [3, 0])
    assert read(tmp_path / "out/tokenizer_config.json")["eos_token"] == "b"


def test_null_tokens_stay_null(source, tmp_path):
    """Qwen's has no bos_token."""
    about = dict(bos_token=None, eos_token="<|endoftext|>")
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    path = source / "config.json"
    path.write_text(json.dumps(read(path) | dict(bos_token_id=None, eos_token_id=None)))
    plan = huggingface.plan(published.open(source), "F32")
    about, config = (json.loads(plan.files[f]) for f in ("tokenizer_config.json", "config.json"))
    assert (about["bos_token"], about["eos_token"]) == (None, "<|endoftext|>")
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 0)


def test_tokens_of_a_gguf_file(tmp_path):
    def edit(writer, _):
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(4)
        writer.add_pad_token_id(999)  # no such token

    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, comparison.PUBLISHED / "llama", "llama", edit=edit)
    model = published.open(path)
    names = [name for name, _ in gguf_files.tokens_of(300)]
    assert model.token_files == {
        "tokenizer_config.json": dict(bos_token=names[0], eos_token=names[3]),
        "generation_config.json": dict(bos_token_id=0, eos_token_id=[3, 4]),
    }
    assert tokens.of_gguf({}) == {}


def test_document_token_of_a_gguf_file(source, tmp_path, monkeypatch):
    """A token of an unknown name opens documents in the workdir, its export, and back."""
    monkeypatch.setattr(gguf_files, "SPECIAL", DEEPSEEK)
    gguf_files.write(tmp_path / "tiny.gguf", source, "qwen2")
    model = published.open(tmp_path / "tiny.gguf")
    workdir = write(model, tmp_path / "workdir")
    assert trained.find(workdir).tokenizer.bos_id == 0
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    assert read(tmp_path / "out/tokenizer_config.json")["bos_token"] == DEEPSEEK
    assert published.open(tmp_path / "out").tokenizer_json == model.tokenizer_json


def encodings(path, name):
    """Returns a tokenizer.json's encodings of texts and pairs, with specials and without.

    Args:
      name: text of a token, which some of the texts contain.
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
def test_exported_tokenizers_encode_alike(source, tmp_path, step, special):
    """The source may or may not put the document token before a text."""
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


def test_a_tokenizer_of_two_kinds_is_refused(source, tmp_path, capsys):
    """Its blanks are SentencePiece's, its decoder is byte-level."""
    backend = tokenizers.Tokenizer.from_str((source / "tokenizer.json").read_text())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    (source / "tokenizer.json").write_text(backend.to_str())
    arguments = [f"--source={source}", f"--out={tmp_path / 'out'}"]
    assert command_line.status(convert.main, arguments) == 2
    said = capsys.readouterr().err
    assert f"{source}: the tokenizer must be byte-level without prefix space (as GPT-2" in said
    assert "or SentencePiece's (as Llama 2" in said and "Give a model with such a" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", sentencepiece_files.KINDS)
def test_sentencepiece_from_import_to_export(source, tmp_path, kind):
    """Also if the embedding has rows without tokens, and a token for padding has no row."""
    backend = sentencepiece_files.backend(kind)
    backend.add_special_tokens(["<pad>"])
    config = read(source / "config.json")
    tensors = load_file(source / "model.safetensors")
    rows = backend.get_vocab_size() - 1 if kind == "llama2" else 430
    for name, x in tensors.items():
        if x.shape[0] == config["vocab_size"]:
            tensors[name] = np.resize(x, (rows, *x.shape[1:]))
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config | dict(vocab_size=rows)))
    (source / "tokenizer.json").write_text(backend.to_str())
    about = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    template += "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    template += "{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    workdir = write(published.open(source), tmp_path / "workdir")
    saved = trained.find(workdir)
    messages = [dict(role="user", content="the cat?")]
    want = backend.encode("<s>[INST] the cat? [/INST]", add_special_tokens=False).ids
    chat = dialogue.of(saved)
    assert chat.prompt(messages).ids == want and backend.token_to_id("</s>") in chat.ends
    # Brackets are text, and names of control tokens in a message become none.
    named = chat.prompt([dict(role="user", content="</s> [INST] <pad>")]).ids
    assert saved.tokenizer.controls == {"<s>", "</s>", "<unk>", "<pad>"}
    assert named.count(saved.tokenizer.special("</s>")) == 0 and named[0] == 1
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    again = tokenizers.Tokenizer.from_str((tmp_path / "out/tokenizer.json").read_text())
    for text in sentencepiece_files.HARD:
        assert again.encode(text).ids == backend.encode(text).ids
    assert published.open(tmp_path / "out").tokenizer_json == published.open(source).tokenizer_json


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


def test_damaged_files_of_a_workdir(chat, tmp_path):
    workdir = write(published.open(chat), tmp_path / "workdir")
    for file in ("generation_config.json", "tokenizer_config.json"):
        before = (workdir / file).read_text()
        for text, said in (("{", "is not JSON"), ("[]", "is not a JSON object")):
            (workdir / file).write_text(text)
            with pytest.raises(UserError, match=f"{file} {said}.*: restore it, or remove it"):
                trained.find(workdir)
        (workdir / file).write_text(before)
    (workdir / "chat_template.jinja").write_bytes(b"\xff")
    said = "chat_template.jinja cannot be read .*: restore it"
    with pytest.raises(UserError, match=said):
        model_lib.open(str(workdir))
    with pytest.raises(UserError, match=said):
        origin.inherit(epath.Path(tmp_path), workdir, 8)


def test_lone_surrogates(source):
    (source / "tokenizer_config.json").write_text('{"bos_token": "\\ud800", "eos_token": "<e>"}')
    files = published.open(source).token_files
    assert files["tokenizer_config.json"] == dict(bos_token=None, eos_token="<e>")
