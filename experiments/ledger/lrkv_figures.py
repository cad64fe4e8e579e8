"""What claims of LRKV come to: from shapes, from the paper's own figures, from tiny models."""

from experiments.ledger import out_of_reach
from experiments.ledger.rotated import rotated
from kvjax.costs import formulas

# % of steps that LRKV needs fewer at 2.5B, of another's: as figure 3 (b) prints them.
SAVINGS = {"MHA": 18.7, "MLA": 21.4, "GQA": 24.5, "MQA": 29.7}

# Table 2: cross-entropy in nats and bits per byte.
TABLE_2 = {
    "128M, MHA": ("2.903", "0.878"),
    "128M, GQA": ("2.918", "0.883"),
    "128M, MQA": ("2.929", "0.886"),
    "128M, MLA": ("2.901", "0.876"),
    "128M, LRKV": ("2.893", "0.872"),
    "2.5B, MHA": ("2.389", "0.723"),
    "2.5B, GQA": ("2.397", "0.725"),
    "2.5B, MQA": ("2.408", "0.729"),
    "2.5B, MLA": ("2.392", "0.724"),
    "2.5B, LRKV": ("2.376", "0.719"),
}
# Table 3: ARC-Easy, ARC-Challenge, MMLU, GSM8K, HumanEval, and what is called their mean.
TABLE_3 = {
    "MHA": (("66.6", "47.1", "39.3", "10.2", "13.4"), "35.3"),
    "GQA": (("65.4", "49.6", "40.5", "10.0", "13.4"), "35.8"),
    "MQA": (("65.2", "47.3", "40.2", "10.3", "3.7"), "33.3"),
    "MLA": (("67.5", "51.5", "41.9", "10.8", "12.8"), "36.9"),
    "LRKV": (("70.7", "53.8", "42.2", "11.3", "11.7"), "37.9"),
}
# Table 5 in % of heads: uncentred and centred, at 128M and at 2.5B.
SMALL = {"MHA": (95.4, 82.4), "LRKV": (96.2, 83.0), "MLA": (83.9, 78.5), "MQA": (72.6, 78.4)}
LARGE = {
    "MHA": (98.9, 94.0),
    "LRKV": (98.3, 93.5),
    "GQA": (95.4, 91.7),
    "MLA": (92.7, 91.6),
    "MQA": (86.2, 91.0),
}
BPB = {name: float(TABLE_2[f"2.5B, {name}"][1]) for name in TABLE_3}  # at 2.5B
# Training FLOPs per token, MHA's being 1, as figure 4 prints them.
COSTS = {"MHA": 1.0, "GQA": 1 - 0.032, "MLA": 1 - 0.037, "MQA": 1 - 0.06, "LRKV": 1 + 0.008}


def five(scale: str) -> tuple[str, ...]:
    """Configs of the paper's mechanisms at a scale."""
    return tuple(f"{name}_{scale}" for name in ("lrkv", "mha", "gqa", "mqa", "mla_paper"))


def relative_flops(config: str, more: float = 0) -> float:
    """Returns the % of a token's training FLOPs that a config takes more than MHA, at d36.

    Args:
      more: FLOPs that the config's own formula does not count.
    """
    flops = out_of_reach.training_flops(config) + more
    return 100 * (flops / out_of_reach.training_flops("mha_2p5b") - 1)


def by_equations_3_and_4() -> float:
    """Returns the same of LRKV where no head's keys and values are made, but latents are attended.

    Per head and cached token its r latents then cost as much as so many channels more, of keys and
    of values; as in `formulas.training_flops_per_token`, every token attends to all.
    """
    experiment = out_of_reach.experiment_of("lrkv_2p5b")
    latents = sum(2 * c.num_heads * c.rank for c in experiment.model.mechanisms)
    return relative_flops("lrkv_2p5b", 6 * experiment.data.sequence_length * latents)


def lrkv_flops() -> dict[str, bool]:
    """Returns which parts of Figure 4's claim hold by equations 3 and 4."""
    more = by_equations_3_and_4()
    return {"more than MHA": more > 0, "0.8 %": round(more, 1) == 0.8}


def lrkv_flops_said() -> str:
    return (
        f"{by_equations_3_and_4():+.1f} by its equations 3 and 4, of 2,048 keys, and "
        f"{relative_flops('lrkv_2p5b'):+.1f} with each head's keys and values made, as training "
        "does here; from shapes, attention included"
    )


def budgets() -> dict[str, float]:
    """exaFLOPs of whole trainings by MQA's and by the costs per token that figure 4 prints."""
    return {name: round(689 / COSTS["MQA"] * COSTS[name]) for name in ("MHA", "GQA", "MLA")}


def flops_saved() -> dict[str, float]:
    """% of FLOPs that LRKV needs fewer, of another's, by its fewer steps."""
    ratio = lambda name: COSTS["LRKV"] / COSTS[name]
    return {name: 100 * (1 - (1 - x / 100) * ratio(name)) for name, x in SAVINGS.items()}


def six_n(config: str) -> float:
    """exaFLOPs of 6 N x 50B tokens; N: weights that multiply a token."""
    model = out_of_reach.experiment_of(config).model
    return 6 * sum(formulas.matrix_weights(model).values()) * 50e9 / 1e18


def lrkv_gqa() -> float:
    """The cache of LRKV x GQA beside MHA's, at d36."""
    c = out_of_reach.experiment_of("lrkv_gqa_2p5b").model.mechanisms[0]
    cached = c.num_bases * c.key_dim + c.num_kv_heads * c.rank
    return cached / (c.num_heads * c.key_dim)


def table_3() -> tuple[float, float, float]:
    """R² of bits per byte and combined scores at 2.5B, of five models.

    Returns:
      Of the figures as printed, and the least and the largest of 10,000 draws that round to them.
    """
    import numpy as np

    bpb = np.array(list(BPB.values()))
    combined = np.array([float(mean) for _, mean in TABLE_3.values()])
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
    """Which mechanisms are points of LRKV as the paper trains it, with r = d_h/2 of d_h = 32."""
    return {name: needed(groups) <= 16 for name, groups in (("MQA", 1), ("GQA-3", 3))}


def contained_said() -> str:
    heads, dim, groups = 18, 128, 6
    rank = dim - dim // groups
    cached = 100 * (1 / heads + rank / dim)
    return (
        f"heads in one group need residuals of rank {needed(1)}, in three groups {needed(3)} of "
        "d_h = 32: d_h less its G-th part, more than the half that the paper trains. At d36 six "
        f"groups take r = {rank} of {dim}, a cache of {cached:.0f} % of MHA's, where GQA has "
        f"{100 * groups / heads:.0f} %. LRKV x GQA contains both"
    )


# -- of the paper's own figures and shapes ---------------------------------------------------------

_HEADS = {"128M": 6, "2.5B": 18, "6.3B": 25}


def as_counted(name: str) -> bool:
    """Whether a row of Table 2 is the mechanism as the paper counts it.

    Without a RoPE key beside MLA's latent, and without the norms that QK-norm of LRKV keeps.
    """
    own_key = "latent" in name and "no RoPE key" not in name
    return not own_key and "normed keys" not in name


def saved() -> dict[str, float]:
    """% of MHA's cache that LRKV saves with r = d_h/2, by equation 6."""
    return {scale: 100 * (1 - 1 / times) for scale, times in smaller().items()}


def saved_said() -> str:
    return ", ".join(f"{scale} {x:.0f} %" for scale, x in saved().items()) + " with r = 64"


def smaller() -> dict[str, float]:
    """How many times smaller LRKV's cache is than MHA's, by equation 6."""
    return {scale: 1 / (1 / heads + 0.5) for scale, heads in _HEADS.items()}


def ahead() -> dict[str, float]:
    """% of bits per byte that LRKV has less than others at 2.5B, by Table 2."""
    return {name: 100 * (1 - BPB["LRKV"] / bpb) for name, bpb in BPB.items() if name != "LRKV"}


def parameters_said() -> str:
    """Says how many parameters MHA has here, at both scales, by which weights are counted."""
    said = []
    for name in ("mha_128m", "mha_2p5b"):
        model = out_of_reach.experiment_of(name).model
        counts = formulas.parameters(model)
        layers, head = (counts["attention"] + counts["mlp"]) / 1e6, counts["head"] / 1e6
        said.append(f"{layers:,.0f}M in layers, {layers + head:,.0f}M with the head")
        said[-1] += f", {counts['total'] / 1e6:,.0f}M in all"
    vocabulary = out_of_reach.experiment_of("mha_2p5b").model.vocab_size
    return f"here, with a vocabulary of {vocabulary:,}, MHA has {'; '.join(said)}"


def key_value_weights() -> dict[str, float]:
    """% of MHA's weights of keys and values that LRKV's have with r = 64, by equation 7."""
    found = {}
    for scale, called in (("128m", "128M"), ("2p5b", "2.5B")):
        lrkv, mha = (
            out_of_reach.experiment_of(f"{name}_{scale}").model for name in ("lrkv", "mha")
        )
        attention = lambda model: formulas.parameters(model)["attention"]
        of_keys_and_values = attention(mha) / 2  # the other half: of queries and outputs
        less = attention(mha) - attention(lrkv)
        found[called] = 100 * (1 - less / of_keys_and_values)
    return found


def overhead() -> dict[str, float]:
    """FLOPs per cached token beyond MHA's, of MHA's, of one layer at d36."""
    models = {name: out_of_reach.experiment_of(f"{name}_2p5b").model for name in ("lrkv", "mha")}
    bases = {"without RoPE": None, "under RoPE": models["mha"].block.angles_base}

    def flops(name: str, base) -> float:
        return models[name].mechanisms[0].decode_flops(base).per_key

    return {how: flops("lrkv", base) / flops("mha", base) - 1 for how, base in bases.items()}


def overhead_said() -> str:
    found = ", ".join(f"{name} {more:.2f}" for name, more in overhead().items())
    return (
        f"{found} of MHA's FLOPs per cached token more at d36, as it is computed here exactly "
        "(reports/decoding.md, LRKV under RoPE)"
    )
