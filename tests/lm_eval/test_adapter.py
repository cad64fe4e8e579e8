"""Tasks of lm-evaluation-harness on a model with random weights."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from tests.convert import workdirs
from tests.lm_eval import local_tasks

pytestmark = pytest.mark.lm_eval
MAX_LENGTH, BOS = local_tasks.MAX_LENGTH, 256  # the byte tokenizer's


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    config = workdirs.config("nanochat", workdirs.grouped(4, 1, 3))  # which sees all tokens
    return workdirs.write(tmp_path_factory.mktemp("lm_eval") / "model", config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return local_tasks.write(tmp_path_factory.mktemp("lm_eval") / "tasks")


@pytest.fixture(scope="module")
def model(workdir):
    from kvjax.lm_eval import adapter

    return adapter.KvjaxLM(workdir, batch_size=4, max_length=MAX_LENGTH)


def _evaluated(model, folder, names=tuple(local_tasks.TASKS), **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, **options
    )


@pytest.fixture(scope="module")
def results(model, folder):
    return _evaluated(model, folder)


@pytest.fixture(scope="module")
def log_p(workdir):
    """[T, V]: what the model makes of token ids, all at once: no cache, no batch."""
    from kvjax.workdir import trained

    whole = trained.load(workdir).model

    def of(ids):
        padded = np.zeros((1, MAX_LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = workdirs.logits(whole, padded)[0, : len(ids)].astype(np.float64)
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))

    return of


def _expected(log_p, context, continuation):
    """The log-likelihood of a continuation, and whether it is greedy; the byte tokenizer's ids."""
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


def test_a_long_text_is_scored_once_in_windows(results, log_p):
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


def test_perplexities_count_words_and_bytes_of_the_text(results):
    samples = results["samples"]["local_texts"]
    total = sum(sample["resps"][0][0] for sample in samples)
    size = sum(len(sample["doc"]["text"].encode()) for sample in samples)
    found = results["results"]["local_texts"]["bits_per_byte,none"]
    assert found == pytest.approx(-total / size / np.log(2), rel=1e-6)


def _greedy(log_p, prompt, num_tokens):
    ids = [BOS, *prompt.encode()][-(MAX_LENGTH - num_tokens) :]
    text = []
    while len(text) < num_tokens:
        text.append(int(log_p([*ids, *text])[-1].argmax()))
        if text[-1] >= BOS:
            return text[:-1]
    return text


def test_text_is_greedy_and_ends_before_a_stop_string(model, folder, results, log_p, tmp_path):
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    texts = {}
    for sample in results["samples"]["local_prompts"]:
        prompt = sample["arguments"][0][0]
        texts[prompt] = decode(_greedy(log_p, prompt, 12))
        assert sample["resps"][0][0] == texts[prompt]
    stop = texts["the cat"][4:6]
    again = _evaluated(model, local_tasks.write(tmp_path, until=stop), ["local_prompts"])
    for sample in again["samples"]["local_prompts"]:
        prompt = sample["arguments"][0][0]
        assert sample["resps"][0][0] == texts[prompt].partition(stop)[0]


def test_nothing_of_torch_is_imported(results):
    assert not {"torch", "transformers", "lm_eval.models.utils"} & set(sys.modules)


def test_batches_and_order_change_nothing(workdir, folder, results):
    from kvjax.lm_eval import adapter

    alone = _evaluated(adapter.KvjaxLM(workdir, batch_size=1, max_length=MAX_LENGTH), folder)
    for name, samples in results["samples"].items():
        for one, other in zip(samples, alone["samples"][name], strict=True):
            if name == "local_prompts":
                assert one["resps"] == other["resps"]
            else:
                np.testing.assert_allclose(
                    np.array(one["resps"], float), np.array(other["resps"], float), atol=1e-4
                )


def test_it_is_found_by_name(workdir, folder, results):
    from kvjax.lm_eval import adapter

    arguments = f"workdir={workdir},step=0,dtype=float32,batch_size=4,max_length={MAX_LENGTH}"
    found = _evaluated("kvjax", folder, ["local_endings"], model_args=arguments)

    # Batches are others', and so is the rounding of sums; e^43 shows it.
    def alike(x):
        return pytest.approx(x, rel=1e-5) if isinstance(x, float) else x

    expected = results["results"]["local_endings"]
    assert found["results"]["local_endings"] == {key: alike(x) for key, x in expected.items()}
    assert found["config"]["max_length"] == MAX_LENGTH and found["config"]["step"] == 0
    assert adapter.KvjaxLM(workdir).max_length == workdirs.CONTEXT


def test_answers_are_kept_for_another_time(workdir, folder, results, tmp_path, monkeypatch):
    from kvjax.decoding.scoring import Scorer
    from kvjax.lm_eval import adapter

    model = adapter.KvjaxLM(workdir, batch_size=4, max_length=MAX_LENGTH)
    kept = []
    keep = adapter.KvjaxLM._loglikelihood_tokens

    def breaks(self, requests, **options):
        found = keep(self, requests, **options)
        kept.extend(found)
        raise KeyboardInterrupt

    names = ["local_choices", "local_endings"]
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(adapter.KvjaxLM, "_loglikelihood_tokens", breaks)
        _evaluated(model, folder, names, use_cache=str(tmp_path / "kept"))
    assert len(kept) == 26
    monkeypatch.delattr(Scorer, "continuations")
    again = _evaluated(model, folder, names, use_cache=str(tmp_path / "kept"))
    for name in names:
        assert again["results"][name] == results["results"][name]


def test_what_cannot_be_asked_is_refused(workdir, model, folder, tmp_path):
    from kvjax.lm_eval import adapter

    def refused(message):
        return pytest.raises(UserError, match=message)

    with refused("batch_size = 0"):
        adapter.KvjaxLM(workdir, batch_size=0)
    with refused("batch_size = 'auto': must be a whole number"):
        adapter.KvjaxLM(workdir, batch_size="auto")
    with refused("max_length = 1"):
        adapter.KvjaxLM(workdir, max_length=1)
    with refused("device = 'cuda:0': JAX uses 'cpu'"):
        adapter.KvjaxLM(workdir, device="cuda:0")
    with refused("--workdir is missing"):
        adapter.KvjaxLM()
    with refused("no workdir of a run"):
        adapter.KvjaxLM(tmp_path)
    with refused("has no tokens: it is empty"):
        model._loglikelihood_tokens([(("x", ""), [BOS, 3], [])])
    with refused(f"has {MAX_LENGTH + 1} tokens"):
        model._loglikelihood_tokens([(("x", "y"), [BOS], [3] * (MAX_LENGTH + 1))])
    with refused("the model has no chat format"):
        _evaluated(model, folder, ["local_prompts"], apply_chat_template=True)
