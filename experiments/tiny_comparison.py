"""Tiny configs at one token budget and several seeds: the README's table, by default of six.

    python -m experiments.tiny_comparison [--seeds=3] [--steps=128] [--save]
    python -m experiments.tiny_comparison --orthogonalize=per_head --mechanisms=mha,lrkv

A seed draws initial weights and data order, the same for all mechanisms (which also share every
weight they have in common), so differences from MHA are taken seed by seed. Runs go to --runs and
resume. Prints a table with 95 % intervals (Student's t over seeds), and one JSON line.
"""

import math
import statistics

from absl import app
from absl import flags
from etils import epath
import jax.numpy as jnp
from scipy import stats

from experiments import record
from experiments.parameter_table import CONFIGS
from experiments.parameter_table import load_config
from kvjax import costs
from kvjax import experiment as experiment_lib
from kvjax import metrics
from kvjax import runtime
from kvjax import train
from kvjax.optim import ORTHOGONALIZE

MECHANISMS = ("mha", "lrkv", "gqa", "mla", "mqa", "mla_paper")

_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs per mechanism.")
_STEPS = flags.DEFINE_integer("steps", 128, "Optimizer steps of 8,192 tokens; 128 is 1.05M tokens.")
_MECHANISMS = flags.DEFINE_list(
    "mechanisms", list(MECHANISMS), "Which; the first is compared against."
)
_ORTHOGONALIZE = flags.DEFINE_enum(
    "orthogonalize", "joint", ORTHOGONALIZE, "Muon's matrices, for all mechanisms."
)
_RUNS = flags.DEFINE_string("runs", "runs/tiny_comparison", "Where the runs go.")
_SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/tiny_comparison.json.")


def run(mechanism: str, seed: int, steps: int, runs: epath.Path) -> dict:
    """Bits per byte at the end, and tokens/s."""
    config = load_config(CONFIGS / f"{mechanism}_tiny.py")
    config.train.update(seed=seed, num_steps=steps, eval_every=steps, checkpoint_every=steps)
    config.train.update(sample_tokens=0)
    config.optimizer.orthogonalize = _ORTHOGONALIZE.value
    workdir = runs / f"{mechanism}_seed{seed}_steps{steps}_{_ORTHOGONALIZE.value}"
    last = train.train(config, workdir)
    timing = [r for r in metrics.read_records(workdir / "timing.jsonl") if "tokens_per_second" in r]
    return dict(bpb=last["validation_bpb"], tokens_per_second=timing[-1]["tokens_per_second"])


def half_interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    n = len(values)
    if n < 2:
        return math.nan
    return stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n)


def main(argv) -> None:
    del argv
    runtime.start()
    runs, seeds = epath.Path(_RUNS.value), range(_SEEDS.value)
    results = {m: [run(m, seed, _STEPS.value, runs) for seed in seeds] for m in _MECHANISMS.value}
    rows = []
    for mechanism, outcome in results.items():
        experiment = experiment_lib.resolve(load_config(CONFIGS / f"{mechanism}_tiny.py"))
        bpb = [r["bpb"] for r in outcome]
        base = results[_MECHANISMS.value[0]]
        paired = [a["bpb"] - b["bpb"] for a, b in zip(outcome, base, strict=True)]
        rows.append(
            dict(
                mechanism=mechanism,
                parameters=costs.parameters(experiment.model)["total"],
                cache_bytes=costs.cache_bytes_per_token(experiment.model, jnp.dtype(jnp.bfloat16)),
                tokens_per_second=statistics.median(r["tokens_per_second"] for r in outcome),
                bpb=bpb,
                bpb_mean=statistics.mean(bpb),
                bpb_half_interval=half_interval(bpb),
                against_mha=statistics.mean(paired),
                against_mha_half_interval=half_interval(paired),
            )
        )
    print(
        "| mechanism | parameters | cache bytes per token (bfloat16) | tokens/s "
        "| bits per byte | against MHA |\n|---|---:|---:|---:|---:|---:|"
    )
    for r in rows:
        print(
            f"| {r['mechanism']} | {r['parameters']:,} | {r['cache_bytes']:,} "
            f"| {r['tokens_per_second']:,.0f} | {r['bpb_mean']:.4f} ± {r['bpb_half_interval']:.4f} "
            f"| {r['against_mha']:+.4f} ± {r['against_mha_half_interval']:.4f} |"
        )
    tokens = _STEPS.value * experiment.tokens_per_step
    result = dict(tokens=tokens, seeds=list(seeds), rows=rows)
    name = "tiny_comparison" + ("_per_head" if _ORTHOGONALIZE.value == "per_head" else "")
    record.record(name, result, save=_SAVE.value)


if __name__ == "__main__":
    app.run(main)
