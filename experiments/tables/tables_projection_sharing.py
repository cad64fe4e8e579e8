"""Projection sharing (arXiv 2606.04032): Tables 1, 5 to 8 and 10."""

from experiments.tables.paper_figure import Figure, cache_bytes
from kvjax.attention import GroupedConfig
from kvjax.costs import formulas
from kvjax.model.config import BlockConfig, TransformerConfig

VARIANTS = {  # tie; KV heads by query heads (16 at 300M, 32 at 1.2B), None: as many as query heads
    "QKV": ("none", None),
    "Q-K=V": ("kv", None),
    "Q=K-V": ("qk", None),
    "Q=K=V": ("qkv", None),
    "GQA": ("none", {16: 4, 32: 8}),
    "MQA": ("none", {16: 1, 32: 1}),
    "Q-GQA": ("kv", {16: 4, 32: 8}),
    "Q-MQA": ("kv", {16: 1, 32: 1}),
}


def sharing(variant: str, *, large: bool = False, **keys) -> TransformerConfig:
    """Returns the paper's 300M or 1.2B model: heads of 64, learned positions, tied head, biases."""
    layers, width, heads = (22, 2048, 32) if large else (20, 1024, 16)
    tie, kv_heads = VARIANTS[variant]
    kv_heads = kv_heads[heads] if kv_heads else heads
    mechanism = GroupedConfig(
        num_heads=heads, num_kv_heads=kv_heads, num_bases=kv_heads, rank=0, tie=tie,
        key_dim=64, value_dim=64, qk_norm="none", **{"bias": True} | keys,
    )  # fmt: skip
    block = BlockConfig(
        num_layers=layers, d_model=width, mlp_dim=4 * width, norm="layer", norm_gain=True,
        norm_bias=True, embedding_norm=False, positions="learned", max_positions=2048,
        activation="gelu", bias=True, tied_head=True, logit_softcap=0.0,
    )  # fmt: skip
    return TransformerConfig(block=block, mechanisms=(mechanism,) * layers, vocab_size=50_304)


def multiply_adds(config: TransformerConfig, T: int) -> dict[str, float]:
    """Returns multiply-adds of a forward pass over T tokens, by part; queries attend to T keys."""
    matrices = formulas.matrix_weights(config)
    total = T * formulas.training_flops_per_token(config, T) / 6
    mlp, head = T * matrices["mlp"], T * matrices["head"]
    return dict(total=total, attention=total - mlp - head, mlp=mlp, head=head)


def table_1() -> dict[str, list[Figure]]:
    """Counts in units of d²: weights and multiply-adds per token, without the output projection."""
    rows, d, m = [], 1024, 64

    def attention(config):
        return formulas.parameters(config)["attention"] / config.block.num_layers

    for variant, expected in (("QKV", "3"), ("Q=K-V", "2"), ("Q-K=V", "2"), ("Q=K=V", "1")):
        config = sharing(variant, bias=False)
        computation = formulas.matrix_weights(config)["attention"] / config.block.num_layers
        rows.append(Figure(f"{variant}: parameters", "d²", expected, attention(config) / d**2 - 1))
        rows.append(Figure(f"{variant}: computation", "nd²", expected, computation / d**2 - 1))
    for variant in ("Q=K-V", "Q=K=V"):
        without = sharing(variant, bias=False)
        with_m = sharing(variant, bias=False, position_channels=m)
        extra = attention(with_m) - attention(without)
        rows.append(Figure(f"({variant})+, m = {m}: parameters more", "", f"{m}", extra))
        T = 2048
        extra = multiply_adds(with_m, T)["total"] - multiply_adds(without, T)["total"]
        rows.append(
            Figure(
                f"({variant})+, m = {m}: computation more, per layer",
                "n²",
                f"{m}",
                extra / T**2 / without.block.num_layers,
                "the paper's map is formed once for all heads; ours rides as m/2 channels of each "
                "of 16 query heads, since a row's half leaves softmax unchanged",
            )
        )
    return {"Projection sharing Table 1: projections of a layer": rows}


def _changes(variant: str, counts: dict, base: dict, **printed: str) -> list[Figure]:
    """Returns the relative changes against QKV by part."""
    return [
        Figure(f"{variant}, {part}: change", "%", figure, 100 * (counts[part] / base[part] - 1))
        for part, figure in printed.items()
    ]


def table_5() -> dict[str, list[Figure]]:
    printed = {
        "QKV": ("305.53", "53.61", "83.97", "167.87", "0.08"),
        "Q-K=V": ("284.54", "53.61", "62.98", "167.87", "0.08"),
        "Q=K-V": ("284.54", "53.61", "62.98", "167.87", "0.08"),
        "Q=K=V": ("263.55", "53.61", "41.98", "167.87", "0.08"),
    }
    parts = ("total", "embedding", "attention", "mlp", "norm")
    rows, base = [], formulas.parameters(sharing("QKV"))
    for variant, figures in printed.items():
        counts = formulas.parameters(sharing(variant))
        for part, figure in zip(parts, figures, strict=True):
            rows.append(Figure(f"{variant}, {part}", "M", figure, counts[part] / 1e6))
    for variant, total, attention in (("Q-K=V", "-6.9", "-25"), ("Q=K=V", "-13.7", "-50")):
        counts = formulas.parameters(sharing(variant))
        rows += _changes(variant, counts, base, total=total, attention=attention)
    return {"Projection sharing Table 5: parameters at 300M": rows}


def table_6() -> dict[str, list[Figure]]:
    printed = {
        "QKV": ("792.69", "343.60", "343.60", "105.50"),
        "Q-K=V": ("749.74", "300.65", "343.60", "105.50"),
        "Q=K-V": ("749.74", "300.65", "343.60", "105.50"),
        "Q=K=V": ("706.79", "257.70", "343.60", "105.50"),
    }
    rows, base = [], multiply_adds(sharing("QKV"), 2048)
    for variant, figures in printed.items():
        counts = multiply_adds(sharing(variant), 2048)
        for part, figure in zip(("total", "attention", "mlp", "head"), figures, strict=True):
            rows.append(Figure(f"{variant}, {part}", "G", figure, counts[part] / 1e9))
    for variant, total, attention in (("Q-K=V", "-5.4", "-12.5"), ("Q=K=V", "-10.8", "-25.0")):
        counts = multiply_adds(sharing(variant), 2048)
        rows += _changes(variant, counts, base, total=total, attention=attention)
    return {"Projection sharing Table 6: multiply-adds of 2,048 tokens, all keys": rows}


def table_7() -> dict[str, list[Figure]]:
    """Uses the paper's units: KB is 1,024 bytes, GB 10^9, 32K 32,000 tokens and 128k 128,000."""
    printed = {
        "QKV": ("80", "2.62", "0"),
        "Q=K-V": ("80", "2.62", "0"),
        "Q-K=V": ("40", "1.31", "50"),
        "Q=K=V": ("40", "1.31", "50"),
        "GQA": ("20", "0.66", "75"),
        "MQA": ("5", "0.16", "93.8"),
        "Q-GQA": ("10", "0.33", "87.5"),
        "Q-MQA": ("2.5", "0.08", "96.9"),
    }
    rows, base = [], cache_bytes(sharing("QKV"))
    for variant, (per_token, at_32k, saved) in printed.items():
        size = cache_bytes(sharing(variant))
        rows.append(Figure(f"{variant}, per token", "KB = 1,024 bytes", per_token, size / 1024))
        rows.append(Figure(f"{variant}, at 32K = 32,000", "GB = 10^9", at_32k, 32_000 * size / 1e9))
        rows.append(Figure(f"{variant}, saved", "%", saved, 100 * (1 - size / base)))
    for variant, at_128k, of_32 in (("QKV", "10.49", "83.9"), ("Q-K=V", "5.24", "41.9")):
        size = cache_bytes(sharing(variant)) / 1e9
        rows.append(Figure(f"{variant}, at 128k = 128,000", "GB", at_128k, 128_000 * size))
        rows.append(Figure(f"{variant}, 32 sequences of 32,000", "GB", of_32, 32 * 32_000 * size))
    why = "1 - 1/(2g) forgets the heads: 1 - g/(2H) is right (equal at g = 4, H = 16)"
    for variant, g in (("Q-GQA", 4), ("Q-MQA", 1)):
        saved = 100 * (1 - cache_bytes(sharing(variant)) / base)
        formula = 100 * (1 - 1 / (2 * g))
        rows.append(
            Figure(f"{variant}, section 2.3's 1 - 1/(2g)", "%", f"{formula:.1f}", saved, why)
        )
    return {"Projection sharing Table 7: cache at 300M, 16 bits": rows}


def table_8() -> dict[str, list[Figure]]:
    printed = {
        128: ("28.9", "23.7", "6.8", "17.7", "13.6"),
        512: ("32.4", "27.7", "6.5", "22.3", "12.9"),
        1024: ("36.5", "32.3", "6.1", "27.7", "12.2"),
        2048: ("43.3", "40.1", "5.4", "36.5", "10.8"),
        4096: ("53.5", "51.3", "4.5", "48.9", "8.9"),
    }
    rows, why = [], "the counts of Table 6 give 32.35 and 53.44"
    for T, (qkv, two, saved_two, one, saved_one) in printed.items():
        base = multiply_adds(sharing("QKV"), T)
        rows.append(Figure(f"{T}, QKV", "%", qkv, 100 * base["attention"] / base["total"], why))
        for variant, share, saved in (("Q-K=V", two, saved_two), ("Q=K=V", one, saved_one)):
            counts = multiply_adds(sharing(variant), T)
            part = 100 * counts["attention"] / counts["total"]
            rows.append(Figure(f"{T}, {variant}", "%", share, part))
            less = 100 * (1 - counts["total"] / base["total"])
            rows.append(Figure(f"{T}, {variant}: saved of all", "%", saved, less))
    return {"Projection sharing Table 8: attention's share of multiply-adds": rows}


def table_10() -> dict[str, list[Figure]]:
    printed = {
        "QKV": ("1,215", "323", "5,900", "0"),
        "Q-K=V": ("1,123", "277", "2,950", "50"),
        "GQA": ("1,077", "231", "1,408", "76"),
        "MQA": ("1,036", "190", "176", "97"),
        "Q-GQA": ("1,054", "208", "704", "88"),
        "Q-MQA": ("1,033", "188", "88", "99"),
    }
    decimal = "MB of 10^6 for this row (5,905.6 and 2,952.8, rounded), of 2^20 for the other four"
    of_mixed = "MiB of this row over MB of QKV's; 75.0 and 98.4 by shapes"
    three_and_half = "3.5·d² per layer instead of 4; the total, 1,215, has 369.3"
    rows, base = [], cache_bytes(sharing("QKV", large=True))
    for variant, (total, attention, cache, saved) in printed.items():
        config = sharing(variant, large=True)
        counts, size = formulas.parameters(config), cache_bytes(config)
        rows.append(Figure(f"{variant}, parameters", "M", total, counts["total"] / 1e6))
        figure = counts["attention"] / 1e6
        rows.append(Figure(f"{variant}, attention", "M", attention, figure, three_and_half))
        mib = 32_768 * size / 2**20
        rows.append(Figure(f"{variant}, cache at 32,768", "MiB", cache, mib, decimal))
        rows.append(Figure(f"{variant}, saved", "%", saved, 100 * (1 - size / base), of_mixed))
    return {"Projection sharing Table 10: 1.2B": rows}


TABLES = (table_1, table_5, table_6, table_7, table_8, table_10)
