"""Rules for claims of LRKV and its blog: from shapes, from printed figures, from tiny models."""

import numpy as np

from experiments.ledger import judge
from kvjax.costs import formulas
from kvjax.foundation.intervals import Estimate, difference

# -- from shapes -----------------------------------------------------------------------------------


@judge.rule
def folds(why: str) -> judge.Judgement:
    """Checks if q·(s + B r) = q·s + (q B)·r, with and without RoPE after the projections."""
    return judge.cases(
        {"no rotation": fold_gap(rope=False) < 1e-9, "RoPE": fold_gap(rope=True) < 1e-9}, why
    )


def fold_gap(*, rope: bool) -> float:
    """Returns the difference of the two sides, for random numbers."""
    rng = np.random.default_rng(0)
    q_H, base_H, residual_R = rng.normal(size=8), rng.normal(size=8), rng.normal(size=3)
    b_HR = rng.normal(size=(8, 3))

    def rotated(x_H: np.ndarray, position: int) -> np.ndarray:
        z_F = (x_H[:4] + 1j * x_H[4:]) * np.exp(1j * position * 0.1 ** np.arange(4))
        return np.concatenate([z_F.real, z_F.imag]) if rope else x_H

    q_H = rotated(q_H, 9)
    folded = q_H @ rotated(base_H, 4) + (q_H @ b_HR) @ residual_R
    return float(abs(folded - q_H @ rotated(base_H + b_HR @ residual_R, 4)))


@judge.rule
def contained() -> judge.Judgement:
    """Checks that LRKV as the paper trains it, r = d_h/2, has MQA and GQA-3 as special cases."""
    heads, dim, groups = 18, 128, 6
    rank = dim - dim // groups
    cached = 100 * (1 / heads + rank / dim)
    return judge.cases(
        {"MQA": residual_rank(1) <= 16, "GQA-3": residual_rank(3) <= 16},
        f"heads in one group need residuals of rank {residual_rank(1)}, in three groups "
        f"{residual_rank(3)} of d_h = 32: d_h less its G-th part, more than the half that the "
        f"paper trains. At d36 six groups take r = {rank} of {dim}, a cache of {cached:.0f} % of "
        f"MHA's, where GQA has {100 * groups / heads:.0f} %. LRKV x GQA contains both",
    )


def residual_rank(groups: int) -> int:
    """Returns the residuals' rank with which LRKV equals GQA of some groups, d_h = 32.

    The base's columns come from the groups in turn, so a group's residual is 0 in its own columns
    only. Groups have random matrices [192, 32], which are independent.
    """
    w_GDH = np.random.default_rng(0).normal(size=(groups, 192, 32))
    base_DH = np.stack([w_GDH[i % groups, :, i] for i in range(32)], axis=1)
    return max(int(np.linalg.matrix_rank(w_DH - base_DH)) for w_DH in w_GDH)


@judge.rule
def decode_overhead(expected: float) -> judge.Judgement:
    """Checks LRKV's FLOPs per cached token beyond MHA's, as a share of MHA's, at d36."""
    models = {name: judge.experiment_of(f"{name}_2p5b").model for name in ("lrkv", "mha")}
    bases = {"without RoPE": None, "under RoPE": models["mha"].block.angles_base}
    overheads = {}
    for name, base in bases.items():
        lrkv, mha = (model.mechanisms[0].decode_flops(base).per_key for model in models.values())
        overheads[name] = lrkv / mha - 1
    ours = ", ".join(f"{name} {overhead:.2f}" for name, overhead in overheads.items())
    return judge.cases(
        {name: round(overhead, 2) == expected for name, overhead in overheads.items()},
        f"{ours} of MHA's FLOPs per cached token more at d36, as it is computed here exactly "
        "(reports/decoding.md, LRKV under RoPE)",
    )


@judge.rule
def relative_flops(config: str, figure: str, why: str) -> judge.Judgement:
    """Checks by how many % a config's training FLOPs per token exceed MHA's, at d36."""
    return judge.rounds_to(figure, more_flops(config), why)


def more_flops(config: str, beside: float = 0) -> float:
    """Returns by how many % a config's training FLOPs per token exceed MHA's, at d36.

    Args:
      beside: FLOPs that the config's own formula does not count.
    """
    return 100 * ((judge.training_flops(config) + beside) / judge.training_flops("mha_2p5b") - 1)


@judge.rule
def lrkv_flops() -> judge.Judgement:
    """Checks "0.8 % more FLOPs than MHA" by equations 3 and 4, which attend to latents.

    Per head and cached token, r latents then cost as much as r more channels of keys and of values.
    As in `formulas.training_flops_per_token`, every token attends to all.
    """
    attended, expanded = latent_flops(), more_flops("lrkv_2p5b")
    return judge.cases(
        {"more than MHA": attended > 0, "0.8 %": round(attended, 1) == 0.8},
        f"{attended:+.1f} by its equations 3 and 4, of 2,048 keys, and {expanded:+.1f} with each "
        "head's keys and values made, as training does here; from shapes, attention included",
    )


def latent_flops() -> float:
    experiment = judge.experiment_of("lrkv_2p5b")
    latents = sum(2 * c.num_heads * c.rank for c in experiment.model.mechanisms)
    return more_flops("lrkv_2p5b", 6 * experiment.data.sequence_length * latents)


@judge.rule
def six_n(config: str, figure: str, why: str) -> judge.Judgement:
    """Checks exaFLOPs of 6 N x 50B tokens; N: weights that multiply a token."""
    weights = sum(formulas.matrix_weights(judge.experiment_of(config).model).values())
    return judge.rounds_to(figure, 6 * weights * 50e9 / 1e18, why)


@judge.rule
def parameters() -> judge.Judgement:
    """Counts MHA's parameters here at both scales, by which weights are counted."""
    counts = []
    for name in ("mha_128m", "mha_2p5b"):
        counted = formulas.parameters(judge.experiment_of(name).model)
        layers, head = (counted["attention"] + counted["mlp"]) / 1e6, counted["head"] / 1e6
        counts.append(
            f"{layers:,.0f}M in layers, {layers + head:,.0f}M with the head, "
            f"{counted['total'] / 1e6:,.0f}M in all"
        )
    vocabulary = judge.experiment_of("mha_2p5b").model.vocab_size
    return judge.Judgement(
        judge.UNDEFINED, f"here, with a vocabulary of {vocabulary:,}, MHA has {'; '.join(counts)}"
    )


@judge.rule
def largest_parameters() -> judge.Judgement:
    """Counts the parameters of the configs for 6.3B."""
    models = [
        judge.experiment_of(f"{name}_6p3b").model
        for name in ("lrkv", "mha", "gqa", "mqa", "mla_paper")
    ]
    totals = [formulas.parameters(model)["total"] / 1e9 for model in models]
    return judge.Judgement(
        judge.UNDEFINED,
        f"configs here have {min(totals):.1f}B to {max(totals):.1f}B, a width and layers of ours",
    )


# -- from printed figures --------------------------------------------------------------------------


@judge.rule
def r_squared(figure: float, bpb: list[float], scores: list[float]) -> judge.Judgement:
    """Checks a printed R² of two rows against 10,000 draws of figures that round to the rows'."""

    def of(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x, y)[0, 1] ** 2)

    rng = np.random.default_rng(0)
    draws = [
        of(bpb + rng.uniform(-5e-4, 5e-4, len(bpb)), scores + rng.uniform(-0.05, 0.05, len(bpb)))
        for _ in range(10_000)
    ]
    least, most = min(draws), max(draws)
    return judge.Judgement(
        judge.CONSISTENT if least <= figure <= most else judge.INCONSISTENT,
        f"{of(np.array(bpb), np.array(scores)):.3f} of the printed pairs, which as rounded allow "
        f"{least:.2f} to {most:.2f}; five points, and the figure's axis is validation where the "
        "table has test",
    )


# -- from tiny models ------------------------------------------------------------------------------


@judge.source
def depth_8(step: int) -> judge.Difference:
    """Returns LRKV less MHA in bits per byte at a step of `experiments.studies.depth_8`."""
    for row in judge.read("depth_8")["by_step"]:
        if (row["mechanism"], row["step"]) == ("lrkv", step):
            return Estimate(row["difference"], row["difference_half_interval"]), len(row["seeds"])
    raise judge.NoResultError(f"depth_8 at step {step}")


@judge.source
def end_of_long_rows() -> judge.Difference:
    """Returns LRKV less MHA in bits per byte over the last half of rows of 1,024 tokens."""
    for row in judge.read("long_rows")["rows"]:
        place = row["places"][-1]
        if (row["mechanism"], row["length"]) == ("lrkv", 1024) and place["difference"] is not None:
            gap = Estimate(place["difference"], place["difference_half_interval"])
            return gap, len(row["seeds"])
    raise judge.NoResultError("long_rows")


def heads_of(mechanism: str) -> dict:
    """Returns the estimates of `studies.head_diversity` for a mechanism, by measure."""
    estimates = judge.read("analysis/head_diversity")["estimates"]
    if not {mechanism, "mha"} <= estimates.keys():
        raise judge.NoResultError(f"head_diversity of {mechanism}")
    return estimates[mechanism]


@judge.source
def heads(measure: str, mechanism: str) -> judge.Difference:
    """Returns a measure of a mechanism's heads less MHA's."""
    gap = heads_of(mechanism)[measure]["against_mha"]
    seeds = len(judge.read("analysis/head_diversity")["seeds"])
    return Estimate(gap["mean"], gap["half_interval"]), seeds


@judge.rule
def order_of_heads(scale: str, measure: str) -> judge.Judgement:
    """Checks the order of each pair of neighbours in Table 5's order of mechanisms."""
    as_published = {}
    for row in judge.read("analysis/head_diversity")["orders"]:
        if row["neighbours"] and (row["scale"], row["measure"]) == (scale, measure):
            gap = Estimate(row["here"]["mean"], row["here"]["half"])
            name = f"{row['first']} over {row['second']} {gap.shown('+.2f')}"
            as_published[name] = row["verdict"] == "as published"
    return judge.cases(as_published, ", ".join(as_published))


@judge.rule
def larger_keys() -> judge.Judgement:
    """Checks that LRKV's keys and their two parts are larger than MHA's keys, in tiny models."""
    lrkv, mha_norm = heads_of("lrkv"), heads_of("mha")["key_total_norm"]["mean"]
    ratios = {
        name.replace("_", " "): lrkv[name]["mean"] / mha_norm
        for name in ("key_base_norm", "key_residual_norm", "key_total_norm")
    }
    ours = ", ".join(f"{name} {ratio:.2f} of MHA's" for name, ratio in ratios.items())
    return judge.cases({name: ratio > 1 for name, ratio in ratios.items()}, ours)


@judge.rule
def centring_raises(mechanism: str, others: list[str], heads: int) -> judge.Judgement:
    """Checks that centring raises one mechanism's effective rank, and no other's, seed by seed.

    Effective ranks are in % of the number of heads N. Centred heads have at most rank N - 1, so
    nothing is judged if the uncentred rank is already larger.
    """
    rises = {name: _centred(name) for name in (mechanism, *others)}
    plain, most = heads_of(mechanism)["share"], 100 * (heads - 1) / heads
    ours = ", ".join(f"{name} {x.shown('+.1f')}" for name, x in rises.items())
    ours += f" points; centred, {heads} heads fill at most {most:.0f} %"
    if plain["mean"] - plain["half_interval"] > most:
        return judge.Judgement(judge.INDISTINCT, f"{ours}: nothing could rise")
    sign = rises.pop(mechanism).sign
    if sign > 0:
        return judge.Judgement(
            judge.IN_PART if any(x.sign > 0 for x in rises.values()) else judge.REPRODUCED, ours
        )
    return judge.Judgement(judge.CONTRADICTED if sign < 0 else judge.INDISTINCT, ours)


def _centred(mechanism: str) -> Estimate:
    """Returns the centred minus the uncentred effective rank, in points."""
    runs = judge.read("analysis/head_diversity")["runs"].get(mechanism, {})
    centred, plain = (
        {seed: run["trained"][measure] for seed, run in runs.items()}
        for measure in ("centred_share", "share")
    )
    rise = difference(centred, plain)
    if rise is None or len(runs) < judge.SEEDS:
        raise judge.NoResultError(f"head_diversity of {mechanism}")
    return rise
