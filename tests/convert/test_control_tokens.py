"""Control tokens of chat templates: one id each, in whichever file a model has them."""

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

from kvjax.conversation import dialogue, jinja_process
from kvjax.convert import into_workdir, published
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained
from tests.convert import comparison, gguf_files, workdirs

START, END = "<|im_start|>", "<|im_end|>"
ADDED = {START: 257, END: 258}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _flagged(special, *, decoder=None, added=None, without=(), listed=True):
    """Returns the files of a byte tokenizer: <|bos|> is 256, START 257 and END 258.

    Args:
      special: flag of START and END in tokenizer.json; None: ordinary tokens of its vocabulary.
      decoder: flag of START in added_tokens_decoder of tokenizer_config.json; None: no decoder.
      added: content of added_tokens.json; None: no such file.
      without: tokens that the decoder lacks.
      listed: True if tokenizer.json has START and END.
    """
    made = tokenizer_lib.byte_tokenizer().with_specials([START, END]) if listed else None
    definition = json.loads((made or tokenizer_lib.byte_tokenizer()).to_json())
    bos, *turn_tokens = definition["added_tokens"]
    turn_tokens = (
        [] if special is None else [token | dict(special=special) for token in turn_tokens]
    )
    about = dict(bos_token="<|bos|>", eos_token="<|bos|>", chat_template=CHATML)
    if decoder is not None:
        flags = [(257, dict(content=START, special=decoder)), (258, dict(content=END))]
        about["added_tokens_decoder"] = {i: t for i, t in flags if t["content"] not in without}
    files = {"tokenizer.json": definition | dict(added_tokens=[bos, *turn_tokens])}
    files["tokenizer_config.json"] = about
    return files | ({} if added is None else {"added_tokens.json": added})


# Files with START and END, or the token type that a GGUF file gives both.
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

# WAYS in which START is special after an import: flagged so in the files, or ordinary before.
FLAGGED = "special another_flag special_and_added vocabulary CONTROL NORMAL".split()


@pytest.fixture
def published_as(tmp_path, monkeypatch):
    """A function of a value of WAYS: the path of a model of 300 rows with that tokenizer."""
    qwen, numbers = comparison.PUBLISHED / "qwen2", itertools.count()

    def write(way):
        path = tmp_path / f"{next(numbers)}.gguf"
        if not isinstance(way, dict):
            tokens = gguf_files.tokens_of(300)
            tokens[259:261] = [(START, way), (END, way)]
            with monkeypatch.context() as patch:
                patch.setattr(gguf_files, "tokens_of", lambda rows: tokens)
                gguf_files.write(path, qwen, "qwen2", template=CHATML)
            return path
        shutil.copytree(qwen, path)
        (path / "chat_template.jinja").unlink()
        stored = load_file(path / "model.safetensors")
        whole = {n: a for n, a in stored.items() if "embed" in n or "lm_head" in n}
        whole = {name: np.resize(array, (300, array.shape[1])) for name, array in whole.items()}
        save_file(stored | whole, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        config |= dict(vocab_size=300, eos_token_id=256)
        for name, tree in (way | {"config.json": config}).items():
            (path / name).write_text(json.dumps(tree))
        return path

    return write


def _workdir(source, folder):
    """Returns a new workdir of a published model."""
    into_workdir.write(published.open(source), epath.Path(folder / "workdir"), {})
    return epath.Path(folder / "workdir")


def test_control_tokens_of_every_file(published_as):
    """Encodes turns as transformers (5.14) and llama.cpp; text never encodes to control tokens."""
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


def test_control_tokens_of_a_workdir(published_as, tmp_path):
    """Texts outside conversations have them too, and so has an export."""
    workdir = _workdir(published_as(WAYS["not_special"]), tmp_path)
    found = trained.find(workdir)
    assert found.tokenizer.ends == (256, 258) and found.tokenizer.special(END) == 258
    assert found.tokenizer.encode(END) == list(END.encode())
    assert found.tokenizer.written_out(f"a{END}") == [END]
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface")
    added = json.loads((tmp_path / "out/tokenizer.json").read_text())["added_tokens"]
    assert [token["special"] for token in added] == [True, False, False]  # as the source has them
    # Other engines stop at these tokens alone: the template's end of a turn is one of them.
    for name in ("config.json", "generation_config.json"):
        stops = json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]
        assert stops == [256, 258], name
    # A broken template is reported when it is used.
    (workdir / "chat_template.jinja").write_text("{% for %}")
    assert trained.find(workdir).tokenizer.ends == (256,)


def test_template_over_its_limits(published_as, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jinja_process, "_TRIAL_SECONDS", 0.3, raising=False)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    said = "chat_template.jinja needs more than 1 GiB of memory, 0.3 seconds or"
    files = _flagged(True)
    files["tokenizer_config.json"] |= dict(chat_template=loops)
    with pytest.raises(UserError, match=f"0.gguf: {said}"):
        published.open(published_as(files))
    workdir = _workdir(published_as(_flagged(True)), tmp_path)
    (workdir / "chat_template.jinja").write_text(loops + CHATML)
    worker_answer = mock.Mock(wraps=jinja_process._worker_answer)
    monkeypatch.setattr(jinja_process, "_worker_answer", worker_answer)
    for _ in range(3):
        assert trained.find(workdir).tokenizer.ends == (256,)
    assert capsys.readouterr().err.count(said) == 1
    assert worker_answer.call_count == 2  # a check of the template, and a trial conversation


def test_files_that_disagree_on_a_token(published_as):
    """Also a named token that the template writes and no file has."""
    for added, listed, said in (
        ({START: 257}, False, f"its chat template writes {END}, which has no id in any file"),
        ({START: 256}, False, "256 is '<|bos|>'"),
        ({START: 259}, True, f"'{START}' is 257"),
        ({START: -1}, True, "an added token '<|im_start|>' with id -1"),
        ({"": 258}, True, "an added token '' with id 258"),
    ):
        files = _flagged(True, added=added, listed=listed)
        files["tokenizer_config.json"] |= dict(eos_token=END)
        with pytest.raises(UserError) as error:
            published.open(published_as(files))
        assert said in str(error.value) and "again" in str(error.value)
    turn_tokens = [START, dict(content=END)]
    for name, key, named in (
        ("tokenizer_config.json", "additional_special_tokens", turn_tokens),
        ("tokenizer_config.json", "extra_special_tokens", turn_tokens),
        ("tokenizer_config.json", "extra_special_tokens", dict(a=START, b=END)),
        ("special_tokens_map.json", "additional_special_tokens", turn_tokens),
    ):
        files = _flagged(True, listed=False)
        files[name] = files.get(name, {}) | {key: named}
        with pytest.raises(UserError, match=f"writes {re.escape(f'{END}, {START}')}, which"):
            published.open(published_as(files))
