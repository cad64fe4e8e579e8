"""A trained model as an `LM` of lm-evaluation-harness, registered as "kvjax".

    lm_eval.simple_evaluate(model=adapter.KvjaxLM(workdir="runs/x"), tasks=["arc_easy"])

Texts are tokenised as in training, with one BOS in front. Requests are batched by length; results
are in the order of the requests.
"""

from collections.abc import Iterable, Iterator, Sequence
import itertools
import os

# The library would compute standard errors in forked processes, which JAX's threads may deadlock.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

from etils import epath
import jax
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
import numpy as np

from kvjax.conversation import calculator, dialogue, specials
from kvjax.decoding import program
from kvjax.decoding.answers import answers
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import BATCH, Scorer
from kvjax.decoding.text import generate
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.lm_eval import generation_settings, options
from kvjax.lm_eval.generation_settings import GenerationSettings
from kvjax.lm_eval.prompts import Prompts
from kvjax.workdir import trained

_CHUNK = 32  # number of batches between writes to the library's cache

# (texts or None, context ids, continuation ids), as lm-evaluation-harness passes them.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """The model of a workdir's checkpoint."""

    def __init__(
        self,
        workdir: epath.PathLike = "",
        *,
        step: int | None = None,
        dtype: str = "",
        cache_dtype: str = "",
        batch_size: int = BATCH,
        max_length: int | None = None,
        chips: int = 1,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        """Loads the model.

        Args:
          step: step of the checkpoint; None: the latest.
          dtype: compute dtype; "": the run's.
          cache_dtype: "int8" or "int4" for a quantised cache; "": in the compute dtype.
          batch_size: sequences per batch, for scoring and generation.
          max_length: maximum tokens of a sequence; None: the training length.
          chips: number of devices that the cache's tokens are sharded over.
          seed: seed of sampling.
          device: must be JAX's platform; lm-evaluation-harness passes it.
          max_batch_size: unused; lm-evaluation-harness passes it.

        Raises:
          UserError: an invalid option, or a workdir that cannot be read.
        """
        super().__init__()
        del max_batch_size
        sizes = dict(batch_size=batch_size, max_length=max_length, chips=chips)
        dtypes = dict(dtype=dtype, cache_dtype=cache_dtype)
        saved = options.find(workdir, step=step, device=device, **dtypes, **sizes)
        self._saved, self._seed = saved, seed
        self._max_length, self.batch_size = max_length or saved.context, batch_size
        self.prompts = Prompts(saved)
        mesh = program.make_mesh(chips, jax.local_devices()) if chips != 1 else None
        loaded = trained.load(saved.workdir, step=saved.step, **dtypes)
        self.generator = Generator(loaded.model, loaded.compute, mesh=mesh)
        self._scorer = Scorer(self.generator, batch=batch_size)
        tokenizer = saved.tokenizer
        control_ids = (tokenizer.special(name) for name in specials.NAMES)
        ends = (tokenizer.bos_id, *tokenizer.ends, *control_ids)
        self._ends = sorted({i for i in ends if i is not None})
        self._without_text = frozenset(np.flatnonzero(tokenizer.token_bytes() == 0).tolist())
        self._device = jax.devices()[0].platform

    def get_model_info(self) -> dict:
        """Returns the description that lm-evaluation-harness saves with the results."""
        return dict(
            workdir=str(self._saved.workdir),
            step=self._saved.step,
            tokenizer=self.prompts.name,  # a digest that covers the chat template
            dtype=self.generator.compute.dtype,
            cache_dtype=self.generator.compute.cache_dtype,
            max_length=self._max_length,
            calculator=calculator.MODES[0],  # for models that call it, in conversations
        )

    # -- texts and tokens --------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._saved.tokenizer.bos_id  # separates documents

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return generation_settings.default_tokens(self._max_length)

    @property
    def tokenizer_name(self) -> str:
        return self.prompts.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        return self.prompts.encode(string, opened=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.prompts.template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict], add_generation_prompt: bool = True
    ) -> str:
        return self.prompts.render(chat_history, opens_answer=add_generation_prompt)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes context + continuation as one text, split after the context's tokens.

        Trailing blanks of the context belong to the continuation, as in the library.
        """
        stripped = context.rstrip()
        whole = self.tok_encode(
            self.prompts.joined(stripped, context[len(stripped) :] + continuation)
        )
        ids = self.tok_encode(stripped)
        return whole[: len(ids)], whole[len(ids) :]

    # -- requests ----------------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = True, **kwargs
    ) -> list[tuple[float, bool]]:
        self._check(requests)
        scores = [None] * len(requests)
        sizes = [len(context) + len(continuation) for _, context, continuation in requests]
        with progress.waiting("scoring") as doing:
            for chunk in _by_size(range(len(requests)), sizes, self.batch_size * _CHUNK):
                doing.at(f"{sum(x is not None for x in scores):,} of {len(requests):,}")
                pairs = [self._truncated(requests[i]) for i in chunk]
                for i, scored in zip(chunk, self._scorer.continuations(pairs), strict=True):
                    scores[i] = (scored.log_likelihood, scored.is_greedy)
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], scores[i])
        return scores

    def _truncated(self, request: Pair) -> tuple[list[int], list[int]]:
        """Truncates the context on the left, to max_length + 1 tokens in all.

        The last token of a continuation is not an input.
        """
        _, context, continuation = request
        return context[-(self._max_length + 1 - len(continuation)) :], continuation

    def _check(self, requests: Iterable[Pair]) -> None:
        """Raises a UserError for a continuation that cannot be scored after its context."""
        for texts, _, continuation in requests:
            if not continuation:
                raise UserError(
                    f"the continuation {texts[1]!r} after {texts[0][-40:]!r} has no tokens: it is "
                    "empty, or shares a token with the end of the context"
                )
            if len(continuation) > self._max_length:
                raise UserError(
                    f"the continuation {texts[1][:40]!r} ... has {len(continuation)} tokens, and "
                    f"the maximum is {self._max_length} (max_length)"
                )

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        # A window of up to max_length tokens is scored after the previous window's last token, the
        # first one after BOS; each token of a text is scored once.
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            text_windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            start = len(windows)
            windows += [(None, *utils.make_disjoint_window(window)) for window in text_windows]
            counts.append(len(windows) - start)
        scored = iter(self._loglikelihood_tokens(windows))
        totals = [float(sum(s for s, _ in itertools.islice(scored, n))) for n in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        prompts, groups = [], {}
        for i, (context, generation_kwargs) in enumerate(request.args for request in requests):
            settings = generation_settings.parse(generation_kwargs, max_length=self._max_length)
            ids = self.tok_encode(context)
            prompts.append(ids[-(self._max_length - settings.num_tokens) :])
            groups.setdefault((settings, self.prompts.is_rendered(context)), []).append(i)
        results: list[str | None] = [None] * len(requests)
        sizes = [len(ids) for ids in prompts]
        batches = [
            (kind, len(group), chosen)
            for kind, group in groups.items()
            for chosen in _by_size(group, sizes, self.batch_size)
        ]
        with progress.waiting("generating") as doing:
            for batch, ((settings, is_rendered), count, chosen) in enumerate(batches):
                doing.at(f"{sum(x is not None for x in results):,} of {len(requests):,}")
                is_native = is_rendered and self.prompts.is_native
                generate_batch = self._answers if is_native else self._texts
                # The last batch repeats prompts: another size would compile another program.
                padded = itertools.islice(itertools.cycle(chosen), min(count, self.batch_size))
                texts = generate_batch([prompts[i] for i in padded], settings, self._seed + batch)
                for i, text in zip(chosen, texts, strict=False):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return results

    def _texts(
        self, prompts: list[list[int]], settings: GenerationSettings, seed: int
    ) -> list[str]:
        """Generates texts after prompts; special tokens that do not end them are dropped."""
        tokenizer = self._saved.tokenizer
        stop = (*settings.stop, tokenizer.decode([tokenizer.bos_id]))
        generated = generate(
            self.generator,
            tokenizer,
            prompts,
            num_tokens=settings.num_tokens,
            sampling=settings.sampling,
            seed=seed,
            stop=stop,
            stop_tokens=self._ends,
            end_at_special=False,
        )
        texts = []
        for ids in generated.tokens:
            text = tokenizer.decode([i for i in ids if i not in self._without_text])
            starts = [text.find(s) for s in stop]
            texts.append(text[: min((start for start in starts if start >= 0), default=None)])
        return texts

    def _answers(
        self, prompts: list[list[int]], settings: GenerationSettings, seed: int
    ) -> list[str]:
        """Generates answers of an assistant, which may call the calculator."""
        native = dialogue.NativeDialogue(self._saved.tokenizer, str(self._saved.workdir))
        generation = dict(
            num_tokens=settings.num_tokens,
            sampling=settings.sampling,
            seed=seed,
            stop=settings.stop,
        )
        return [answer.text for answer in answers(self.generator, native, prompts, **generation)]


def _by_size(items: Iterable[int], sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yields batches of items, largest first."""
    for chosen in itertools.batched(sorted(items, key=lambda i: -sizes[i]), count):
        yield list(chosen)
