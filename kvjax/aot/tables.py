"""Prints the tables of `python -m kvjax.aot`."""

from kvjax.foundation.output import Output

OVER_100 = "MFU over 100 %: it counts attention over all T keys, and the causal kernel skips half"


def show(r: dict, out: Output, *, limit: float) -> None:
    """Prints a result as tables.

    Args:
      r: result of `training` or `decoding` of kvjax.aot.__main__.
      limit: largest share of memory that counts as fitting.
    """
    m = r["memory"]
    mesh = ", ".join(f"{k} {n}" for k, n in r.get("mesh", {}).items() if n > 1) or "one chip"
    chips = f"{r['topology']}: {r['chips']} x {r['device']}, {mesh}"
    out.say(f"\n{r['config']} ({r['step']}) on {chips}")
    out.say(
        f"lowered in {r['seconds_to_lower']:.1f} s, compiled in {r['seconds_to_compile']:.1f} s"
    )
    out.say("\nMemory per chip" + (", an upper bound" if r["memory_is_upper_bound"] else ""))
    parts = ("arguments", "outputs", "temporaries", "program", "total")
    out.table(["", "GB"], [*((key, _gb(m[key])) for key in parts), ("HBM", _gb(m["hbm"]))])
    verdict = "fits" if r["fits"] else "DOES NOT FIT"
    out.say(f"\n{m['part']:.1%} of HBM, at most {limit:.0%}: {verdict}")
    show_bound = _show_decoding if r["step"] == "decode" else _show_training
    show_bound(r, out)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f}"


def _show_decoding(r: dict, out: Output) -> None:
    b, gflop = r["bound"], r["flops_per_token"] / 1e9
    out.say(f"\n{gflop:.3f} GFLOP per token, {_gb(r['read_bytes'])} GB read per step and chip")
    out.say(f"weights in bfloat16, caches in {r['cache_dtype']}")
    rate = f"{b['tokens_per_second']:,.0f} tokens/s"
    out.say(f"at least {1e3 * b['seconds']:.3f} ms, at most {rate}")


def _show_training(r: dict, out: Output) -> None:
    b = r["bound"]
    for row in r["replicated"]:
        out.say(f"replicated on every chip: {row['parameter']}, {row['bytes'] / 1e6:.1f} MB")
    f, chips = r["flops_per_step"], r["chips"]
    out.say(f"\n{r['flops_per_token'] / 1e9:.3f} GFLOP per token; TFLOP per step and chip")
    keys = ("model", "needed", "rematerialised", "newton_schulz")
    counted = f"{r['xla']['flops'] / 1e12:,.2f}" if "flops" in r["xla"] else "-"
    out.table(
        ["model", "needed", "rematerialised", "Newton-Schulz", "by XLA, loops once"],
        [(*(f"{f[key] / chips / 1e12:,.2f}" for key in keys), counted)],
    )
    out.say(f"\nAttention: {r['attention']}")
    out.say("\nCollectives per step and chip")
    rows = [
        (c["kind"], c["scope"], c["count"], _gb(c["bytes"]), _gb(c["wire_bytes"]))
        for c in r["collectives"]
    ]
    runs = sum(c["count"] for c in r["collectives"])
    out.table(
        ["kind", "from", "runs", "GB", "GB sent"],
        [*rows, ("all", "", runs, "", _gb(r["wire_bytes"]))],
    )
    times = ", ".join(f"{key} {1e3 * b[key]:.1f}" for key in ("compute", "hbm", "interconnect"))
    out.say(f"\nThe step takes at least, in ms: {times}")
    out.say("if " + "; ".join(b["assumptions"]))
    out.say(
        f"\nat most {b['mfu']:.1%} MFU ({b['causal_mfu']:.1%} without masked keys), "
        f"{b['tokens_per_second']:,.0f} tokens/s; "
        f"at least {b['days']:.1f} days for {b['exaflops']:,.0f} exaFLOPs"
    )
    if b["mfu"] > 1:
        out.say(f"{OVER_100}; the figure in brackets does not count masked keys")


def show_candidates(rows: list[dict], out: Output) -> None:
    """Prints a sweep's candidates as one table."""
    out.say("\nCandidates, in the order compiled; times are predicted if compiling failed")
    header = ["mesh", "accumulation", "remat", "GB predicted", "GB needed", "fits", "bound ms"]
    out.table([*header, "by", "ms without overlap", "MFU at most"], map(_candidate, rows))
    for r in rows:
        if r["failure"]:
            settings = f"{r['remat']}, accumulation {r['grad_accumulation']}"
            out.say(f"\nDid not compile ({settings}): {r['failure']}")


def _candidate(r: dict) -> tuple:
    mesh = " ".join(f"{axis} {n}" for axis, n in r["mesh"].items() if n > 1) or "one chip"
    needed = "unknown" if r["needed_bytes"] is None else f"{r['needed_bytes'] / 1e9:.2f}"
    fits = "yes" if r["fits"] else "no"
    if r["failure"]:
        needed, fits = "-", "did not compile"
    return (
        mesh,
        r["grad_accumulation"],
        r["remat"],
        f"{r['predicted_bytes'] / 1e9:.2f}",
        needed,
        fits,
        f"{1e3 * r['bound_seconds']:.1f}",
        r["bound_by"],
        f"{1e3 * r['seconds_in_sum']:.1f}",
        f"{r['mfu']:.1%}",
    )
