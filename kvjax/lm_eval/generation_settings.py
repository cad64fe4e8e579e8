"""Parses the generation_kwargs of a task of lm-evaluation-harness."""

from collections.abc import Mapping
from typing import NamedTuple

from kvjax.decoding.sampling import Sampling
from kvjax.foundation.errors import UserError

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Options that kvjax does not have are accepted only with these values, which change nothing.
_NEUTRAL = dict(num_beams=1, repetition_penalty=1.0, use_cache=True, num_return_sequences=1)


def default_tokens(max_length: int) -> int:
    """Returns the default number of tokens to generate: 256, but at most half of max_length."""
    return min(256, max_length // 2)


class GenerationSettings(NamedTuple):
    """Settings of a generation; requests with equal settings are batched together."""

    num_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling


def parse(generation_kwargs: Mapping, *, max_length: int) -> GenerationSettings:
    """Returns the settings that the generation_kwargs of a request or a task describe.

    Args:
      max_length: maximum tokens of a prompt and its continuation together.

    Raises:
      UserError: a value is invalid, a key is unknown, or so many tokens leave no room for a prompt.
    """
    remaining = dict(generation_kwargs)
    lengths = [(key, remaining.pop(key, None)) for key in _LENGTHS]
    length_default = ("max_gen_toks", default_tokens(max_length))
    length_key, num_tokens = next(((k, v) for k, v in lengths if v is not None), length_default)
    if type(num_tokens) is not int or num_tokens < 1:
        raise _refused(length_key, num_tokens, "must be a whole number of at least 1")
    if num_tokens >= max_length:
        raise _refused(
            length_key,
            num_tokens,
            f"must be less than max_length = {max_length}, since the prompt counts too; a larger "
            "--max_length may exceed the length that the model was trained on",
        )
    do_sample = remaining.pop("do_sample", None)
    temperature = remaining.get("temperature")
    if do_sample is None and type(temperature) in (int, float):
        do_sample = temperature > 0  # as lm-evaluation-harness
    numbers = dict(temperature=1.0, top_k=0, top_p=1.0)
    for key, default in numbers.items():
        value = remaining.pop(key, None)
        value = default if value is None else value
        if type(value) not in (int, float):
            raise _refused(key, value, "must be a number")
        numbers[key] = value
    sampling = Sampling(**numbers if do_sample else dict(temperature=0.0))
    until = remaining.pop("until", None)
    until = [until] if isinstance(until, str) else until or []
    if not isinstance(until, (list, tuple)) or not all(isinstance(s, str) for s in until):
        raise _refused("until", until, "must be a text, or a list of texts")
    for key, value in remaining.items():
        if key not in _NEUTRAL or value != _NEUTRAL[key]:
            known = (*_LENGTHS, "until", "do_sample", *numbers)
            raise _refused(key, value, f"is not supported; supported are {', '.join(known)}")
    return GenerationSettings(num_tokens, tuple(s for s in until if s), sampling)


def _refused(key: str, value, reason: str) -> UserError:
    return UserError(f"generation_kwargs: {key} = {value!r} {reason}")
