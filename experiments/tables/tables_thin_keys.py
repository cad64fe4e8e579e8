"""Thin keys (arXiv 2603.04427): Table 11."""

from experiments.tables.paper_figure import Figure, cache_bytes
from kvjax.attention import GroupedConfig
from kvjax.model.config import BlockConfig, TransformerConfig


def thin(divisor: int) -> dict[str, float]:
    """Returns cache bytes per token of keys and values: width 4096, 32 layers, 32 heads, 16 bits.

    Args:
      divisor: key channels are 128 / divisor per head.
    """
    block = BlockConfig(num_layers=32, d_model=4096, mlp_dim=4 * 4096)
    mechanism = GroupedConfig(
        num_heads=32, num_kv_heads=32, num_bases=32, rank=0, key_dim=128 // divisor, value_dim=128
    )
    config = TransformerConfig(block=block, mechanisms=(mechanism,) * 32, vocab_size=32_000)
    key = sum(m.entry()["base_key"].shape[1] for m in config.mechanisms) * 32 * 2
    total = cache_bytes(config)
    return dict(K=key, V=total - key, total=total)


def table_11() -> dict[str, list[Figure]]:
    """Uses the paper's units: 128K is 128,000 tokens, 1M 1,000,000, GB 10^9 bytes."""
    printed = {
        "128K": (128_000, 1e9, ["33.6 33.6 67.2", "16.8 33.6 50.4", "8.4 33.6 42.0"]),
        "1M": (1_000_000, 1e9, ["262 262 524", "131 262 393", "66 262 328"]),
        "100 users at 1M": (10**8, 1e12, [". . 52.4", ". . 39.3", ". . 32.8"]),
    }
    savings = {"128K": "16.8 25.2", "1M": "131 196", "100 users at 1M": "13.1 19.6"}
    conventions = "128K is 128,000 tokens and GB 10^9 bytes (131,072 would be 34.4 GB, or 32 GiB)"
    summed = "sum or difference of figures already rounded"
    rows = []
    for context, (tokens, unit, columns) in printed.items():
        name = "TB" if unit == 1e12 else "GB"
        for divisor, figures in zip((1, 2, 4), columns, strict=True):
            sizes = thin(divisor)
            for array, figure in zip(sizes, figures.split(), strict=True):
                note = conventions if figure == "33.6" and divisor == 1 else ""
                if figure != ".":
                    label = f"{context}, d_select = d/{divisor}: {array}"
                    rows.append(
                        Figure(label, name, figure, tokens * sizes[array] / unit, summed, note)
                    )
        for divisor, figure in zip((2, 4), savings[context].split(), strict=True):
            saved = tokens * (thin(1)["total"] - thin(divisor)["total"]) / unit
            rows.append(Figure(f"{context}, d/{divisor}: saved", name, figure, saved, summed))
    for divisor, figure in ((2, "25"), (4, "37.5")):
        saved = 100 * (1 - thin(divisor)["total"] / thin(1)["total"])
        rows.append(Figure(f"d/{divisor}: saved", "%", figure, saved))
    more = 100 * (thin(1)["total"] / thin(4)["total"] - 1)
    rows.append(Figure("d/4: more users in the same memory", "%", "60", more))
    return {"Thin keys Table 11: cache per user": rows}


TABLES = (table_11,)
