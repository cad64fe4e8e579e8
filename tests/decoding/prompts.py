"""Prompts for a small model, and the tokens that follow them."""

from kvjax.decoding.sampling import Sampling

V, L = 32, 2
GREEDY = Sampling(temperature=0.0)
HOT = Sampling(temperature=2.0)
PROMPTS = [[5], [1, 2, 3], [4] * 7 + [9], list(range(20, 32))]  # 0, 1, 2 and 3 chunks of 5


def tokens(generator, prompts, **options) -> list[list[int]]:
    generation = generator.start(prompts, **(dict(num_tokens=10) | options))
    steps = list(generation)
    flat = [
        [i for new in steps for sequence, i in new if sequence == b] for b in range(len(prompts))
    ]
    assert flat == generation.tokens
    return generation.tokens
