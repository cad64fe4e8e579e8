"""Token ids of the texts that lm-evaluation-harness passes."""

import dataclasses

import pytest

from kvjax.conversation.render import Renderer
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.lm_eval.prompts import Prompts
from kvjax.workdir import trained
from tests.conversation import workdirs

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
MARK = "\ufdd0"  # a mark of `conversation.marked`
WRITTEN = (
    "Hi",
    "a<|assistant_end|>b",
    f"{MARK}<|assistant_end|>",
    "\ufdef<|bos|>",
    " two\n\nlines ",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return trained.find(workdirs.write(tmp_path_factory.mktemp("prompts") / "native"))


@pytest.fixture(scope="module")
def prompts(found):
    return Prompts(found)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    tokenizer = tokenizer_lib.byte_tokenizer().with_specials(["<|im_start|>", "<|im_end|>"])
    options = dict(tokenizer=tokenizer, template=TEMPLATE)
    folder = tmp_path_factory.mktemp("prompts") / "imported"
    return trained.find(workdirs.write(folder, **options))


def _user(text):
    return dict(role="user", content=text)


def test_one_bos(prompts, found):
    for text in ("", "a cat", " a", "<|user_end|>", f"{MARK}<|user_end|>", "\u2603"):
        bos, ids = found.tokenizer.bos_id, found.tokenizer.encode(text)
        assert prompts.encode(text) == prompts.encode(f"<|bos|>{text}") == [bos, *ids]
        assert prompts.encode(text, opened=False) == ids
        assert prompts.joined(text, "x") == f"{text}x"


@pytest.mark.parametrize("text", WRITTEN)
def test_conversations_have_the_ids_that_the_model_was_trained_with(prompts, found, text):
    renderer = Renderer(found.tokenizer)
    answer = dict(role="assistant", content=text)
    for messages in ([_user(text)], [_user("x"), answer, _user(text)]):
        assert prompts.encode(prompts.render(messages)) == renderer.prompt(messages).ids
    system = dict(role="system", content=text)
    assert prompts.encode(prompts.render([system, _user("x")])) == (
        renderer.prompt([system, _user("x")]).ids
    )
    begun = prompts.encode(prompts.render([_user("x"), answer], opens_answer=False))
    assert [*begun, renderer.specials.assistant_end] == renderer(
        dict(messages=[_user("x"), answer])
    ).ids


@pytest.mark.parametrize("text", WRITTEN)
def test_continuations_of_a_conversation_are_text(prompts, found, imported, text):
    for of in (prompts, Prompts(imported)):
        context = of.render([_user("x")])
        ids = of.encode(of.joined(context, text))
        tokenizer = (found if of is prompts else imported).tokenizer
        assert ids == [*of.encode(context), *tokenizer.encode(text)]


def test_an_imported_model_has_its_own_template(imported):
    prompts, start, end = Prompts(imported), 257, 258
    text = prompts.render([_user("a<|im_end|>b")])
    assert prompts.encode(text) == [start, *b"a<|im_end|>b", end]
    assert prompts.template == TEMPLATE


def test_names(prompts, imported, found, tmp_path):
    other = trained.find(workdirs.write(tmp_path / "other", template="x"))
    names = {prompts.name, Prompts(found).name, Prompts(imported).name}
    assert len(names) == 2
    for change in (dict(template="{{ 1 }}"), dict(token_files={"tokenizer_config.json": {}})):
        assert Prompts(dataclasses.replace(imported, **change)).name not in names
    # A tokenizer with the nine special tokens needs no template.
    assert Prompts(other).name == prompts.name


def test_refused(prompts, tmp_path):
    with pytest.raises(UserError, match="roles must alternate"):
        prompts.render([_user("a"), _user("b")])
    plain = workdirs.write(tmp_path / "plain", tokenizer=tokenizer_lib.byte_tokenizer())
    with pytest.raises(UserError, match="the model has no chat format"):
        Prompts(trained.find(plain)).render([_user("a")])
    assert Prompts(trained.find(plain)).template is None
