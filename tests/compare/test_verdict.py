"""The sentences above a comparison."""

from kvjax.compare import verdict


def _row(name, bpb, cache, against=None, half=None, bpb_half=0.01, tokens=9):
    row = dict(name=name, bpb=bpb, bpb_half_interval=bpb_half, cache_bytes=cache, tokens=tokens)
    return row | dict(against=against, against_half_interval=half)


MHA = _row("mha", 2.0, 1000)


def test_each_curve_is_judged_by_its_interval():
    """The bound of an interval is no win; the sign tells better from worse."""
    rows = [
        _row("lrkv", 1.9, 560, -0.1, 0.05),
        MHA,
        _row("mla", 2.1, 180, 0.1, 0.05),
        _row("gqa", 1.95, 333, -0.05, 0.05),
        _row("mqa", 2.2, 60, 0.2, None),
        _row("going", None, 60),
    ]
    first, second = verdict.lines(rows, "mha")
    assert first == (
        "Against mha (2.0000 ± 0.0100 bits per byte, 1,000 cache bytes in bfloat16): "
        "better: lrkv (-0.1000 ± 0.0500, 56 % of the cache); "
        "worse: mla (+0.1000 ± 0.0500, 18 % of the cache); "
        "not distinguishable at 95 %: gqa (-0.0500 ± 0.0500, 33 % of the cache); "
        "one common seed, so no interval: mqa (+0.2000, 6 % of the cache)."
    )
    assert second == "Each of the 3 intervals is at 95 %, not corrected for their number."


def test_nothing_to_compare_with():
    assert verdict.lines([_row("a", None, 5)], "a") == [
        "No run has finished: there is no verdict yet."
    ]
    alone = "mha: 2.0000 ± 0.0100 bits per byte with 1,000 cache bytes per token in bfloat16"
    assert verdict.lines([MHA], "mha") == [f"{alone}."]
    longer = _row("longer", 2.5, 1000, tokens=18)
    assert verdict.lines([longer, MHA], "mha") == [
        f"{alone}, the least of 2; none has as many tokens as mha."
    ]


def test_runs_without_a_common_seed_are_not_compared():
    other = _row("other", 2.5, 1000)
    (line,) = verdict.lines([other, MHA], "mha")
    assert line.endswith(
        "the least of 2; none has as many tokens and a finished seed in common with mha."
    )
    first = verdict.lines([other, MHA, _row("lrkv", 1.9, 560, -0.1, 0.05)], "mha")[0]
    assert first.endswith("of the cache); no common seed, so not compared: other.")


def test_the_reference_may_not_have_finished():
    rows = [_row("running", None, 1000), _row("a", 2.0, 500)]
    (line,) = verdict.lines(rows, "running")
    assert line.startswith("a: 2.0000") and "none has as many tokens as running" not in line


def test_many_are_counted():
    rows = [MHA, *(_row(f"r{i}", 2.1, 500, 0.1, 0.01) for i in range(6))]
    first, _ = verdict.lines(rows, "mha")
    assert first.count("of the cache") == 4 and "and 2 more." in first
