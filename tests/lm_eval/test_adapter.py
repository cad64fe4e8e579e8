"""Tasks of lm-evaluation-harness on a model with random weights."""

import sys

import jax
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from tests.convert import workdirs
from tests.lm_eval import local_tasks

pytestmark = pytest.mark.lm_eval
MAX_LENGTH, BOS = local_tasks.MAX_LENGTH, 256  # the byte tokenizer's


@pytest.fixture(scope="module")
def model(workdir):
    from kvjax.lm_eval import adapter

    return adapter.KvjaxLM(workdir, batch_size=4, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def results(model, folder, evaluated):
    return evaluated(model, folder)


@pytest.fixture(scope="module")
def log_p(workdir):
    """A function of token ids: [T, V] log-probabilities, without cache or batch."""
    from kvjax.workdir import trained

    whole = trained.load(workdir).model

    def of(ids):
        padded = np.zeros((1, MAX_LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = workdirs.logits(whole, padded)[0, : len(ids)].astype(np.float64)
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))

    return of


def _expected(log_p, context, continuation):
    """Returns the log-likelihood of a continuation, and True if it is greedy."""
    kept = context.rstrip()
    ids = [BOS, *kept.encode(), *(context[len(kept) :] + continuation).encode()]
    count = len(ids) - 1 - len(kept.encode())
    ids = ids[-MAX_LENGTH - 1 :]
    log_p_TV, targets = log_p(ids[:-1])[-count:], ids[-count:]
    chosen = log_p_TV[np.arange(count), targets]
    return chosen.sum(), bool((log_p_TV.argmax(axis=-1) == targets).all())


@pytest.mark.parametrize("name", ["local_choices", "local_endings"])
def test_continuations_are_scored_after_their_contexts(results, log_p, name):
    seen = 0
    for sample in results["samples"][name]:
        for (context, continuation), ((found, greedy),) in zip(
            sample["arguments"], sample["resps"], strict=True
        ):
            expected, is_greedy = _expected(log_p, context, continuation)
            assert found == pytest.approx(expected, abs=1e-4)
            assert greedy == is_greedy
            seen += 1
    assert seen == {"local_choices": 22, "local_endings": 4}[name]


def test_long_texts_are_scored_in_windows(results, log_p):
    for sample in results["samples"]["local_texts"]:
        ids, total = list(sample["arguments"][0][0].encode()), 0.0
        for start in range(0, len(ids), MAX_LENGTH):
            new = ids[start : start + MAX_LENGTH]
            end = start + len(new)
            before = (
                ids[max(end - MAX_LENGTH - 1, 0) : end - 1] if start else [BOS, *ids[: end - 1]]
            )
            log_p_TV = log_p(before)[-len(new) :]
            total += log_p_TV[np.arange(len(new)), new].sum()
        assert sample["resps"][0][0] == pytest.approx(total, abs=1e-3)


def _greedy(log_p, prompt, num_tokens):
    ids = [BOS, *prompt.encode()][-(MAX_LENGTH - num_tokens) :]
    text = []
    while len(text) < num_tokens:
        text.append(int(log_p([*ids, *text])[-1].argmax()))
        if text[-1] >= BOS:
            return text[:-1]
    return text


def test_greedy_text_and_stop_string(model, folder, results, log_p, tmp_path, evaluated):
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    texts = {}
    for sample in results["samples"]["local_prompts"]:
        prompt = sample["arguments"][0][0]
        texts[prompt] = decode(_greedy(log_p, prompt, 12))
        assert sample["resps"][0][0] == texts[prompt]
    stop = texts["the cat"][4:6]
    again = evaluated(model, local_tasks.write(tmp_path, until=stop), ["local_prompts"])
    for sample in again["samples"]["local_prompts"]:
        prompt = sample["arguments"][0][0]
        assert sample["resps"][0][0] == texts[prompt].partition(stop)[0]


def test_torch_is_not_imported(results):
    assert not {"torch", "transformers", "lm_eval.models.utils"} & set(sys.modules)


def test_registered_name(workdir, folder, results, evaluated):
    from kvjax.lm_eval import adapter

    arguments = f"workdir={workdir},step=0,dtype=float32,batch_size=4,max_length={MAX_LENGTH}"
    found = evaluated("kvjax", folder, ["local_endings"], model_args=arguments)

    # Other batches round sums differently; a perplexity of e^43 shows it.
    def alike(x):
        return pytest.approx(x, rel=1e-5) if isinstance(x, float) else x

    expected = results["results"]["local_endings"]
    assert found["results"]["local_endings"] == {key: alike(x) for key, x in expected.items()}
    assert found["config"]["max_length"] == MAX_LENGTH and found["config"]["step"] == 0
    assert adapter.KvjaxLM(workdir).max_length == workdirs.CONTEXT


def test_chat_template_of_a_model_without_one(model, folder, evaluated):
    with pytest.raises(UserError, match="the model has no chat format"):
        evaluated(model, folder, ["local_prompts"], apply_chat_template=True)
