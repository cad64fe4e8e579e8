"""Tiny configs, by default six, trained on the same tokens with several seeds: bits per byte.

    python -m experiments.studies.tiny_comparison [--seeds=3] [--steps=128] [--save]
    python -m experiments.studies.tiny_comparison --orthogonalize=per_head --mechanisms=mha,lrkv

A seed draws initial weights and data order, the same for all mechanisms (which also share every
weight they have in common), so differences from MHA are taken seed by seed. Runs go to --runs and
resume; what they say goes to standard error. Prints a table with 95 % intervals (Student's t over
seeds).
"""

import argparse
import contextlib
import pathlib
import statistics
import sys

from etils import epath
import jax.numpy as jnp
import ml_collections

from experiments import record
from experiments.tables.parameter_table import load_config
from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation import lists
from kvjax.foundation import runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.configuration import at_least
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.estimate import estimate
from kvjax.foundation.output import Output
from kvjax.optim import ORTHOGONALIZE
from kvjax.training import loop
from kvjax.workdir import metrics

MECHANISMS = ("mha", "lrkv", "gqa", "mla", "mqa", "mla_paper")


def config_of(mechanism: str, steps: int, orthogonalize: str) -> ml_collections.ConfigDict:
    """The tiny config of a mechanism, for runs of so many steps."""
    config = load_config(CONFIGS / f"{mechanism}_tiny.py")
    config.train.update(num_steps=steps, eval_every=steps, checkpoint_every=steps)
    config.train.update(sample_tokens=0)
    config.optimizer.orthogonalize = orthogonalize
    return config


def run(config: ml_collections.ConfigDict, workdir: epath.Path) -> dict:
    """Bits per byte at the end, and tokens/s (None of a run of a step or two)."""
    with contextlib.redirect_stdout(sys.stderr):
        last = loop.train(config, workdir)
    records = metrics.read_records(workdir / "timing.jsonl")
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return dict(bpb=last["validation_bpb"], tokens_per_second=speeds[-1] if speeds else None)


def row(mechanism: str, experiment: experiment_lib.Experiment, found: list, base: list) -> dict:
    """Figures of one mechanism, from its runs and those it is compared against, seed by seed."""
    bpb = [r["bpb"] for r in found]
    speeds = [speed for r in found if (speed := r["tokens_per_second"])]
    paired = [a["bpb"] - b["bpb"] for a, b in zip(found, base, strict=True)]
    return dict(
        mechanism=mechanism,
        parameters=formulas.parameters(experiment.model)["total"],
        cache_bytes=formulas.cache_bytes_per_token(experiment.model, jnp.dtype(jnp.bfloat16)),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        bpb=bpb,
        bpb_mean=statistics.mean(bpb),
        bpb_half_interval=estimate(bpb).half,
        against_mha=statistics.mean(paired),
        against_mha_half_interval=estimate(paired).half,
    )


def _cells(r: dict) -> tuple[str, ...]:
    more = lambda half: "" if half is None else f" ± {half:.4f}"
    return (
        r["mechanism"],
        f"{r['parameters']:,}",
        f"{r['cache_bytes']:,}",
        f"{speed:,.0f}" if (speed := r["tokens_per_second"]) else "-",
        f"{r['bpb_mean']:.4f}{more(r['bpb_half_interval'])}",
        f"{r['against_mha']:+.4f}{more(r['against_mha_half_interval'])}",
    )


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs per mechanism (3)")
    add("--steps", type=int, default=128, help="of 8,192 tokens; 128, the default, are 1.05M")
    text = f"the first is compared against ({','.join(MECHANISMS)})"
    add("--mechanisms", default=",".join(MECHANISMS), help=text)
    text = f"Muon's matrices, of {', '.join(ORTHOGONALIZE)} (joint)"
    add("--orthogonalize", default="joint", help=text)
    add("--runs", default="runs/tiny_comparison", help="where the runs go (runs/tiny_comparison)")
    add("--save", action="store_true", help="write experiments/results/tiny_comparison.json")
    parser.add_output()
    options = parser.parse(arguments)
    known = sorted(path.stem.removesuffix("_tiny") for path in CONFIGS.glob("*_tiny.py"))
    options.mechanisms = lists.names("--mechanisms", options.mechanisms, known)
    at_least("--seeds", options.seeds, 1)
    at_least("--steps", options.steps, 1)
    one_of("--orthogonalize", options.orthogonalize, ORTHOGONALIZE)
    if not options.runs:
        raise UserError("--runs= is empty: give a folder, as runs/tiny_comparison")
    options.runs = runtime.folder("--runs", options.runs)
    if "://" not in str(options.runs):
        record.check_folder("--runs", pathlib.Path(options.runs))
    record.check(options.save)
    return options


def main(arguments: list[str]) -> None:
    """Trains what is not trained yet, and prints."""
    options = _options(arguments)
    kind, steps, seeds = options.orthogonalize, options.steps, range(options.seeds)
    configs = {name: config_of(name, steps, kind) for name in options.mechanisms}
    experiments = {name: experiment_lib.resolve(config) for name, config in configs.items()}
    runtime.start()
    results = {name: [] for name in configs}
    for name, config in configs.items():
        for seed in seeds:
            config.train.seed = seed
            workdir = options.runs / f"{name}_seed{seed}_steps{steps}_{kind}"
            command_line.say(f"{name}, seed {seed} of {len(seeds)}")
            results[name].append(run(config, workdir))
    base = results[options.mechanisms[0]]
    rows = [row(name, experiments[name], found, base) for name, found in results.items()]
    out = Output(options)
    header = ("mechanism", "parameters", "cache bytes per token (bfloat16)", "tokens/s")
    out.table((*header, "bits per byte", "against MHA"), map(_cells, rows))
    tokens = steps * experiments[options.mechanisms[0]].tokens_per_step
    result = dict(tokens=tokens, seeds=list(seeds), rows=rows)
    name = "tiny_comparison" + ("_per_head" if kind == "per_head" else "")
    record.record(name, result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
