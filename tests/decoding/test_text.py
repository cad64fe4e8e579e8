"""Stop strings and special tokens end a text; callbacks get an answer while it is generated."""

import dataclasses
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.conversation.dialogue import NativeDialogue, PlainDialogue
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding import answers as answers_lib
from kvjax.decoding.generation import Timing
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text import generate
from kvjax.foundation.errors import UserError
from tests.decoding.prompts import GREEDY


@pytest.fixture(scope="module")
def generator(loaded):
    return Generator(loaded.model, loaded.compute)


@pytest.mark.slow
def test_a_stop_string_ends_the_work_too(loaded, generator):
    options = dict(num_tokens=20, sampling=Sampling(temperature=0.0))

    def make(**keys):
        return generate(generator, loaded.tokenizer, ["a", "bc"], **options, **keys)

    free = make()
    stop = free.texts[0][2]
    cut = make(stop=[stop])
    assert cut.texts[0] == free.texts[0][: free.texts[0].index(stop)]
    assert cut.tokens[0] == free.tokens[0][: len(cut.texts[0]) + 1]


@pytest.mark.slow
def test_special_tokens_end_a_text(loaded):
    """A model in which every token is followed by BOS."""
    bos = loaded.tokenizer.bos_id
    graph, params = nnx.split(loaded.model)
    params = nnx.to_pure_dict(params)
    params["head"] = np.zeros_like(params["head"])
    params["head"][0, bos] = 1e3
    # Activations are all but the embedding's first channel, which is the same for every token.
    params["embedding"] = np.zeros_like(params["embedding"])
    params["embedding"][:, 0] = 1e3
    for segment in params["segments"].values():
        segment["attention"]["out"] = np.zeros_like(segment["attention"]["out"])
        segment["mlp"]["down"] = np.zeros_like(segment["mlp"]["down"])
    model = nnx.merge(graph, jax.tree.map(jax.numpy.asarray, params))
    generator = Generator(model, loaded.compute)
    options = dict(num_tokens=3, sampling=Sampling(temperature=0.0))
    assert generate(generator, loaded.tokenizer, ["a", "b"], **options).texts == ["", ""]
    options["end_at_special"] = False
    assert generate(generator, loaded.tokenizer, ["a"], **options).texts == ["<|bos|>" * 3]


class Scripted:
    """A Generator and its Generation in one; generates given tokens and logs its calls.

    Args:
      script: tokens by sequence; None ends the sequence.
      num_tokens: number of steps.
    """

    chips = 3
    config = types.SimpleNamespace(vocab_size=262)
    compute = types.SimpleNamespace(dtype=np.dtype("float16"), cache_dtype="float16")

    def __init__(self, script, num_tokens, cache=None):
        self._script, self._num_tokens, self.cache = (
            [list(ids) for ids in script],
            num_tokens,
            cache,
        )
        self.log, self.tokens = [], [[] for _ in script]
        self.finished = np.zeros(len(script), bool)
        self.timing = Timing(prompt_tokens=7, first=0.5, last=1.0, decoded=6)

    def start(self, prompts, **options):
        self.log.append((prompts, options))
        return self

    def __iter__(self):
        for n in range(1, self._num_tokens + 1):
            new = []
            for b in np.flatnonzero(~self.finished).tolist():
                token = self._script[b].pop(0)
                if token is None:
                    self.finished[b] = True
                else:
                    self.tokens[b].append(token)
                    new.append((b, token))
            self.finished |= n == self._num_tokens
            yield new
            if self.finished.all():
                return

    def finish(self, b):
        self.log.append(("finish", b))
        self.finished[b] = True

    def force(self, b, ids):
        self._script[b][:0] = ids


def test_texts_reach_the_callbacks_piece_by_piece(make_mechanism):
    """Three sequences end by length, at a stop string and by a special token."""
    tokenizer = tokenizer_lib.byte_tokenizer().with_specials(["<|end|>"])
    tokenizer.ends = (97,)
    size = dict(batch=3, capacity=256, dtype=jnp.float16, chips=1)
    cache = cache_lib.abstract((make_mechanism("mha"),) * 2, **size)
    script = [b"a\xe2\x82\xacbc\xe2", b"x. y", [*b"yes", None]]
    scripted = Scripted(script, 7, cache)
    for keys, message in (
        (dict(prompts="ab"), "prompts = 'ab' is one string: give a list"),
        (dict(stop="x"), "stop = 'x' is one string: give a list"),
        (dict(stop=["a", ""]), "a stop string is empty"),
    ):
        with pytest.raises(UserError, match=message):
            generate(scripted, tokenizer, **dict(prompts=["a"]) | keys, num_tokens=1)
    assert scripted.log == []
    log = scripted.log
    result = generate(
        scripted,
        tokenizer,
        ["h\u00e9", [5, 6], "x"],
        num_tokens=7,
        stop=[". "],
        stop_tokens=[9],
        on_text=lambda b, text: log.append((b, text)),
        on_end=lambda b: log.append((b, None)),
    )
    default = dict(sampling=Sampling(temperature=0.8, top_k=0, top_p=1.0), seed=0, capacity=0)
    default |= dict(on_compile=None, on_prefill=None)
    ends = [9, 256, 257, 258, 259, 260, 261, 97]  # given, without text, of no token, of the model
    prompts = [[256, *b"h\xc3\xa9"], [5, 6], [256, 120]]
    assert log[0] == (prompts, dict(num_tokens=7, stop_tokens=ends) | default)
    steps = [
        *[(0, "a"), (1, "x"), (2, "y")],
        *[(0, ""), (1, ""), (2, "e")],
        *[(0, ""), (1, ""), ("finish", 1), (2, "s"), (1, ""), (1, None)],
        *[(0, "\u20ac"), (2, ""), (2, None)],
        *[(0, "b"), (0, "c"), (0, ""), (0, "\ufffd"), (0, None)],
    ]
    assert log[1:] == steps
    live = cache_lib.live_bytes(cache)
    assert dataclasses.asdict(result) == dict(
        texts=["a\u20acbc\ufffd", "x", "yes"],
        tokens=[[*script[0]], [*b"x. "], [*b"yes"]],
        timing=dataclasses.asdict(scripted.timing),
        capacity=256,
        cache_bytes=live,
        cache_dtype="float16",
        chips=3,
    )
    line = f"first token after 500.0 ms, then 12 tokens/s; cache {live:,} bytes = 3 x 256 tokens x "
    assert result.summary() == f"{line}{live / 768:,.0f} in float16, {live // 3:,} on each chip"
    late = dataclasses.replace(result, timing=Timing(7, compiling=2.04, first=0.5), chips=1)
    line = "first token after 500.0 ms (without the 2.0 s of compiling before); cache "
    assert late.summary().startswith(line) and late.summary().endswith(" in float16")
    # Without end tokens, and with all options.
    options = dict(
        num_tokens=1, sampling=GREEDY, seed=2, capacity=3, on_compile=len, on_prefill=max
    )
    scripted = Scripted([b"a"], 1, cache)
    generate(scripted, tokenizer, ["a"], end_at_special=False, **options)
    assert scripted.log == [([[256, 97]], options | dict(stop_tokens=()))]


def test_an_assistant_calls_the_calculator_while_it_answers():
    """Results are forced after calls; answers end by a token, at a stop string, or by length."""
    names = tokenizer_lib.CONVERSATION_SPECIALS
    talk = NativeDialogue(tokenizer_lib.byte_tokenizer().with_specials(names), "here")
    s = talk.specials

    def call(text):
        return [s.python_start, *text, s.python_end]

    def written(ids):
        return "".join(names[i - s.bos] if i > 255 else chr(i) for i in ids)

    out = [s.output_start, *b"8.0", s.output_end]
    script = [
        [*b"a", *call(b"16/2"), *b"b", None],  # the result is forced after the call
        [*b"4.no", *b"....."],
        [s.python_end, *call(b""), *call(b"x"), *b"abcdefghi"],  # calls without a result
        [*b"z" * 13, 194],
    ]
    scripted, heard, timed = Scripted(script, 14), [], []
    prompts = [[1], [2, 3], [4], [5]]
    replies = answers_lib.answers(
        *(scripted, talk, prompts),
        num_tokens=14,
        stop=[".n"],
        on_token=lambda *event: heard.append(event),
        timing=timed.append,
    )
    expected_options = dict(num_tokens=14, sampling=Sampling(temperature=0.0), seed=0, capacity=0)
    expected_options |= dict(stop_tokens=(s.assistant_end, s.bos), on_compile=None)
    assert scripted.log == [(prompts, expected_options), ("finish", 1)]
    first = [*script[0][:-2], *out, *b"b"]
    third = script[2][:14]
    assert replies == [
        answers_lib.Answer(first, written(first), [("16/2", "8.0")], True),
        answers_lib.Answer([*b"4.n"], "4", [], True),
        answers_lib.Answer(third, written(third), [("x", None)], False),
        answers_lib.Answer(script[3], "z" * 13 + "\ufffd", [], False),
    ]
    assert [event for event in heard if event[0] == 1] == [(1, 52, "4"), (1, 46, ""), (1, 110, "")]
    assert heard[-1] == (3, -1, "\ufffd") and timed == [scripted.timing]
    options = dict(num_tokens=20, sampling=Sampling(), seed=3, capacity=4, on_compile=len)
    scripted = Scripted([[*call(b"16/2"), None]], 20)
    (answer,) = answers_lib.answers(scripted, talk, [[1]], mode="dataset", **options)
    assert answer.calls == [("16/2", "8")] and answer.text.endswith("8<|output_end|>")
    assert scripted.log == [([[1]], options | dict(stop_tokens=talk.ends))]
    assert answers_lib.Answer() == answers_lib.Answer([], "", [], False)
    plain = Scripted([[s.python_start, *b"1+1", s.python_end, None]], 9)
    (answer,) = answers_lib.answers(plain, PlainDialogue(talk.tokenizer), [[1]], num_tokens=9)
    assert answer.calls == [] and answer.ids == call(b"1+1")
    for keys, message in ((dict(mode="x"), "calculator = 'x'"), (dict(stop=[""]), "is empty")):
        with pytest.raises(UserError, match=message):
            answers_lib.answers(Scripted([], 1), talk, [[1]], num_tokens=1, **keys)
