"""Generation in turns, and the agreement of texts."""

from experiments.benchmarks import beside_transformers as beside


def test_turns_are_taken_with_the_same_prompts_and_the_first_is_not_measured():
    calls = []

    def contender(name):
        def generate(prompt, num_tokens):
            calls.append((name, prompt))
            rate = float(len(calls))
            return dict(tokens=[0] * num_tokens, first=0.1 * rate, decode_tokens_per_second=rate)

        return generate

    contenders = {name: contender(name) for name in "ab"}
    runs = beside.in_turns(contenders, vocab_size=50, prompt=6, new=3, repeats=3)
    assert [name for name, _ in calls] == list("abababab")
    prompts = [prompt for _, prompt in calls]
    assert prompts[::2] == prompts[1::2] and prompts[0] != prompts[2]
    assert all(len(prompt) == 6 and 0 <= min(prompt) <= max(prompt) < 50 for prompt in prompts)
    found = beside.figures(runs["a"])["decode_tokens_per_second"]
    assert found == dict(median=5.0, least=3.0, most=7.0)


def test_agreement_ends_where_tokens_first_differ():
    def completions(*texts):
        return [dict(tokens=list(text)) for text in texts]

    runs = dict(
        a=completions([1, 2, 3], [4, 5, 6], [7, 8, 9]),
        b=completions([1, 2, 3], [4, 0, 6], [0, 8, 9]),
    )
    assert beside.agreement(runs) == [3, 1, 0]
