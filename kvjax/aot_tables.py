"""What `python -m kvjax.aot` prints of its results."""


def show(r: dict, *, limit: float) -> None:
    """Prints a result as tables.

    Args:
      r: as `aot.training` or `aot.decoding` makes it.
      limit: the part of memory that may be used.
    """
    gb = lambda count: f"{count / 1e9:,.2f}"
    m = r["memory"]
    kind = ", ".join(f"{k} {n}" for k, n in r.get("mesh", {}).items() if n > 1) or "one chip"
    print(f"\n{r['config']} ({r['step']}) on {r['topology']}: {r['chips']} x {r['device']}, {kind}")
    print(f"lowered in {r['seconds_to_lower']:.1f} s, compiled in {r['seconds_to_compile']:.1f} s")
    print("\nMemory per chip" + (", an upper bound" if r["memory_is_upper_bound"] else ""))
    _table(["", "GB"])
    for key in ("arguments", "outputs", "temporaries", "program", "total"):
        _row(key, gb(m[key]))
    _row("HBM", gb(m["hbm"]))
    verdict = "fits" if r["fits"] else "DOES NOT FIT"
    print(f"\n{m['part']:.1%} of HBM, at most {limit:.0%}: {verdict}")
    b = r["bound"]
    if r["step"] == "decode":
        gflop, rate = r["flops_per_token"] / 1e9, b["tokens_per_second"]
        print(f"\n{gflop:.3f} GFLOP per token, {gb(r['read_bytes'])} GB read per step and chip")
        print(f"at least {1e3 * b['seconds']:.3f} ms, at most {rate:,.0f} tokens/s")
        return
    for row in r["replicated"]:
        print(f"whole on every chip: {row['parameter']}, {row['bytes'] / 1e6:.1f} MB")
    f, chips = r["flops_per_step"], r["chips"]
    print(f"\n{r['flops_per_token'] / 1e9:.3f} GFLOP per token; TFLOP per step and chip")
    _table(["model", "needed", "rematerialised", "Newton-Schulz", "XLA's, loops once"])
    keys = ("model", "needed", "rematerialised", "newton_schulz")
    counted = f"{r['xla']['flops'] / 1e12:,.2f}" if "flops" in r["xla"] else "-"
    _row(*(f"{f[key] / chips / 1e12:,.2f}" for key in keys), counted)
    print(f"\nAttention: {r['attention']}")
    print("\nCollectives per step and chip")
    _table(["kind", "from", "runs", "GB", "GB sent"])
    for c in r["collectives"]:
        _row(c["kind"], c["scope"], c["count"], gb(c["bytes"]), gb(c["wire_bytes"]))
    _row("all", "", sum(c["count"] for c in r["collectives"]), "", gb(r["wire_bytes"]))
    print("\nThe step takes at least, in ms: ", end="")
    print(", ".join(f"{key} {1e3 * b[key]:.1f}" for key in ("compute", "hbm", "interconnect")))
    print("if " + "; ".join(b["assumptions"]))
    print(
        f"\nat most {b['mfu']:.1%} MFU ({b['causal_mfu']:.1%} without masked keys), "
        f"{b['tokens_per_second']:,.0f} tokens/s; "
        f"at least {b['days']:.1f} days for {b['exaflops']:,.0f} exaFLOPs"
    )


def show_candidates(rows: list[dict]) -> None:
    """Prints what a sweep tried as one table."""
    print("\nCandidates, in the order compiled; what did not compile has predicted times")
    header = ["mesh", "parts", "remat", "GB predicted", "GB needed", "fits", "bound ms", "by"]
    _table([*header, "ms in sum", "MFU at most"])
    for r in rows:
        mesh = " ".join(f"{axis} {n}" for axis, n in r["mesh"].items() if n > 1) or "one chip"
        needed = "not said" if r["needed_bytes"] is None else f"{r['needed_bytes'] / 1e9:.2f}"
        sizes = [f"{r['predicted_bytes'] / 1e9:.2f}", needed]
        times = [f"{1e3 * r['bound_seconds']:.1f}", r["bound_by"]]
        times += [f"{1e3 * r['seconds_in_sum']:.1f}", f"{r['mfu']:.1%}"]
        fits = "yes" if r["fits"] else "no"
        if r["failure"]:
            sizes[1], fits = "-", "did not compile"
        _row(mesh, r["grad_accumulation"], r["remat"], *sizes, fits, *times)
    for r in rows:
        if r["failure"]:
            print(
                f"\nDid not compile ({r['remat']}, {r['grad_accumulation']} parts): {r['failure']}"
            )


def _table(header: list[str]) -> None:
    print("\n| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|")


def _row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")
