"""What claims of LRKV come to: from shapes, from the paper's own figures, from tiny models."""

from collections.abc import Sequence
import dataclasses

from experiments.ledger import verdicts
from experiments.ledger.rotated import rotated
from kvjax.costs import formulas
from kvjax.foundation.estimate import Estimate
from kvjax.foundation.estimate import difference

# % of steps that LRKV needs fewer at 2.5B, of another's: as figure 3 (b) prints them.
SAVINGS = {"MHA": 18.7, "MLA": 21.4, "GQA": 24.5, "MQA": 29.7}


def relative_flops(config: str) -> float:
    """% of a token's training FLOPs more than MHA's, at d36."""
    return 100 * (verdicts.training_flops(config) / verdicts.training_flops("mha_2p5b") - 1)


def six_n(config: str) -> float:
    """exaFLOPs of 6 N x 50B tokens; N: weights that multiply a token."""
    model = verdicts.experiment_of(config).model
    return 6 * sum(formulas.matrix_weights(model).values()) * 50e9 / 1e18


def lrkv_gqa() -> float:
    """The cache of LRKV x GQA beside MHA's, at d36."""
    c = verdicts.experiment_of("lrkv_gqa_2p5b").model.mechanisms[0]
    cached = c.num_bases * c.key_dim + c.num_kv_heads * c.rank
    return cached / (c.num_heads * c.key_dim)


def table_3() -> tuple[float, float, float]:
    """R² of bits per byte and combined scores at 2.5B, of five models.

    Returns:
      Of the figures as printed, and the least and the largest of 10,000 draws that round to them.
    """
    import numpy as np

    bpb = np.array([0.723, 0.725, 0.729, 0.724, 0.719])
    combined = np.array([35.3, 35.8, 33.3, 36.9, 37.9])
    of = lambda x, y: float(np.corrcoef(x, y)[0, 1] ** 2)
    rng = np.random.default_rng(0)
    draws = [
        of(bpb + rng.uniform(-5e-4, 5e-4, 5), combined + rng.uniform(-0.05, 0.05, 5))
        for _ in range(10_000)
    ]
    return of(bpb, combined), min(draws), max(draws)


def table_3_said() -> str:
    printed, least, most = table_3()
    return (
        f"{printed:.3f} of the printed pairs, which as rounded allow {least:.2f} to {most:.2f}; "
        "five points, and the figure's axis is validation where the table has test"
    )


def fold_gap(*, rope: bool) -> float:
    """How far equation 3 is from q·k of whole keys, in random numbers, with and without RoPE."""
    import numpy as np

    rng = np.random.default_rng(0)
    q_H, base_H, residual_R = rng.normal(size=8), rng.normal(size=8), rng.normal(size=3)
    b_HR = rng.normal(size=(8, 3))

    turned = rotated if rope else lambda x_H, position: x_H
    q_H = turned(q_H, 9)
    folded = q_H @ turned(base_H, 4) + (q_H @ b_HR) @ residual_R
    return float(abs(folded - q_H @ turned(base_H + b_HR @ residual_R, 4)))


def needed(groups: int) -> int:
    """The rank of residuals that heads in so many groups need, of d_h = 32.

    Around a base whose columns come from every group in turn: a group differs from it in the
    columns of the others alone. Of random matrices [192, 32], which are independent.
    """
    import numpy as np

    w_GDH = np.random.default_rng(0).normal(size=(groups, 192, 32))
    base_DH = np.stack([w_GDH[i % groups, :, i] for i in range(32)], axis=1)
    return max(int(np.linalg.matrix_rank(w_DH - base_DH)) for w_DH in w_GDH)


def contained() -> dict[str, bool]:
    """Which mechanisms are points of LRKV at a rank below d_h = 32; MHA is r = d_h."""
    return {name: needed(groups) < 32 for name, groups in (("MQA", 1), ("GQA-3", 3))}


def contained_said() -> str:
    heads, dim, groups = 18, 128, 6
    rank = dim - dim // groups
    cached = 100 * (1 / heads + rank / dim)
    return (
        f"heads in one group need residuals of rank {needed(1)}, in three groups {needed(3)} of "
        "d_h = 32: d_h less its G-th part. It pays nothing: at d36 six groups take r = "
        f"{rank} of {dim}, a cache of {cached:.0f} % of MHA's, where GQA has "
        f"{100 * groups / heads:.0f} %. LRKV x GQA contains both"
    )


def first_component() -> dict[str, bool]:
    """Whether the largest share of variance can be at most 20 %, and at least 15.

    An effective rank of n components, exp of their entropy, leaves the largest share at least 1/n;
    Table 5's centred ones, of H heads.
    """
    ranks = {"128M, LRKV": 0.830 * 6, "2.5B, MHA": 0.940 * 18}
    least = {name: 1 / rank for name, rank in ranks.items()}
    return {
        "128M: no more than 20 %": least["128M, LRKV"] <= 0.20,
        "2.5B: no less than 15 %": most(0.940 * 18, 18) >= 0.15,
    }


def most(rank: float, heads: int) -> float:
    """The largest first share that has this effective rank: all others alike, of heads - 1."""
    import numpy as np

    shares = np.linspace(1 / (heads - 1), 0.999, 10_000)
    others = (1 - shares) / (heads - 2)
    entropy = -shares * np.log(shares) - (heads - 2) * others * np.log(others)
    return float(shares[np.exp(entropy) >= rank][-1])


def first_component_said() -> str:
    return (
        f"by Table 5's centred effective ranks: at 128M it is at least {100 / (0.83 * 6):.0f} %, "
        f"at 2.5B at most {100 * most(0.94 * 18, 18):.1f} % (MHA)"
    )


def centring() -> dict[str, bool]:
    """Which changes that section 6.3 states are those of Table 5 at 2.5B, in points."""
    table = {"MHA": (98.9, 94.0), "LRKV": (98.3, 93.5), "GQA": (95.4, 91.7), "MQA": (86.2, 91.0)}
    text = {"MHA": -0.9, "LRKV": -0.8, "GQA": -3.7, "MQA": 4.8}
    return {name: round(b - a, 1) == text[name] for name, (a, b) in table.items()}


def magnitudes() -> dict[str, bool]:
    """Whether parts of keys are larger than MHA's whole keys, in the tiny models."""
    return {name.replace("_", " "): ratio > 1 for name, ratio in norms().items()}


def norms() -> dict[str, float]:
    found, whole = verdicts.heads_of("lrkv"), verdicts.heads_of("mha")["key_total_norm"]["mean"]
    parts = ("key_base_norm", "key_residual_norm", "key_total_norm")
    return {name: found[name]["mean"] / whole for name in parts}


def norms_said() -> str:
    return ", ".join(f"{name.replace('_', ' ')} {x:.2f} of MHA's" for name, x in norms().items())


@dataclasses.dataclass(frozen=True)
class Rises:
    """Whether centring raises the effective rank of one mechanism's heads, and of no other's.

    In % of their number, seed by seed. Centred heads fill at most all but one of their number, so
    where more are filled already nothing could rise, and nothing is told.
    """

    mechanism: str
    others: Sequence[str]
    heads: int

    def judge(self) -> verdicts.Found:
        moved = {name: self._moved(name) for name in (self.mechanism, *self.others)}
        plain = verdicts.heads_of(self.mechanism)["share"]
        most = 100 * (self.heads - 1) / self.heads
        said = ", ".join(f"{name} {x.shown('+.1f')}" for name, x in moved.items())
        said += f" points; centred, {self.heads} heads fill at most {most:.0f} %"
        if plain["mean"] - plain["half_interval"] > most:
            return verdicts.Found(verdicts.UNTOLD, f"{said}: nothing could rise")
        mine = moved.pop(self.mechanism).sign
        if mine > 0:
            alone = not any(x.sign > 0 for x in moved.values())
            return verdicts.Found(verdicts.REPRODUCED if alone else verdicts.PART, said)
        return verdicts.Found(verdicts.CONTRADICTED if mine < 0 else verdicts.UNTOLD, said)

    def _moved(self, name: str) -> Estimate:
        """Centred less plain, points."""
        runs = verdicts.read("analysis/head_diversity")["runs"].get(name, {})
        of = lambda measure: {seed: run["trained"][measure] for seed, run in runs.items()}
        found = difference(of("centred_share"), of("share"))
        if found is None or len(runs) < verdicts.SEEDS:
            raise verdicts.NoResultError(f"head_diversity of {name}")
        return found
