"""Training speed: tokens/s, MFU, and the fraction of the machine's own matrix-multiply rate.

    python -m experiments.benchmarks.train_benchmark [--config=configs/mha_tiny.py ...] [--save]
    python -m experiments.benchmarks.train_benchmark --config=configs/mha_128m.py \\
        --config=configs/lrkv_128m.py --rows=32 --set=compute.remat=none --torch --save  # on a GPU

Whole training steps, optimizer included, on one batch of random tokens: the median and range of
--steps after some to warm up. --set is keys of every config, space-separated; each --set is timed
by itself. --torch adds a plain PyTorch model of the same shape, compiled by `torch.compile` (see
torch_training.py), for each config that is MHA, with the batch of the first --set. Everything runs
in a process of its own, one after another, PyTorch first; what fails is listed at the end, and the
exit status is 1.

FLOPs are those of `costs.formulas.training_flops_per_token` (attention over all keys, nothing for
rematerialisation or the optimizer). MFU is of the datasheet's bfloat16 peak, where there is one;
the other rate is of a square product in the compute dtype, before and after each of our runs. Peak
memory is what the library's allocator handed out. Prints a table; --save writes
experiments/results/train_benchmark.json, off the CPU train_benchmark_DEVICE.json.
"""

import argparse
import dataclasses
import importlib.util
import os
import re
import statistics

import jax

from experiments import record
from experiments.benchmarks import contender
from experiments.benchmarks.jax_training import load
from kvjax.aot.tables import OVER_100
from kvjax.attention import GroupedConfig
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets
from kvjax.model.config import BlockConfig
from kvjax.optim import OptimizerConfig

ATTENTION = ("flash", "cudnn", "default")  # PyTorch's
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_TITLES = ("config", "tokens/s", "range", "GFLOP/s", "MFU", "of matrix multiply")
_TITLES += ("first step, s", "GB at most", "loss")


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table: who trains what."""

    name: str
    experiment: Experiment
    module: str
    arguments: dict


def our_run(path: str, changes: str, rows: int | None, steps: int) -> Run:
    """A config with changed keys ("a.b=1 c.d=2").

    Raises:
      UserError: what `load` raises.
    """
    overrides = changes.split()
    if rows is not None:
        overrides.append(f"train.batch_size={rows}")
    experiment = load(path, overrides)
    arguments = dict(path=path, overrides=overrides, steps=steps)
    name = " ".join([experiment.name, *changes.split()])
    return Run(name, experiment, "experiments.benchmarks.jax_training", arguments)


def torch_run(experiment: Experiment, attention: str, mode: str, steps: int) -> Run:
    """The PyTorch model of the experiment's shape; see `torch_training.training_speed`.

    Raises:
      UserError: the experiment's model or optimizer is not one that torch_training.py has.
    """
    model, optimizer = experiment.model, experiment.optimizer
    if not is_plain(experiment):
        raise UserError(
            f"--torch: {experiment.name} is not the recipe's MHA, which is all that "
            "experiments/benchmarks/torch_training.py has: give a config like configs/mha_128m.py"
        )
    block, mechanism = model.block, model.mechanisms[0]
    shape = dict(
        vocab_size=model.vocab_size,
        num_layers=block.num_layers,
        d_model=block.d_model,
        num_heads=mechanism.num_heads,
        head_dim=mechanism.key_dim,
        mlp_dim=block.mlp_dim,
        rope_base=block.rope_base,
        norm_epsilon=block.norm_epsilon,
        logit_softcap=block.logit_softcap,
    )
    keys = (
        *("matrix_learning_rate", "embedding_learning_rate", "head_learning_rate"),
        *("momentum_start", "momentum_end", "momentum_warmup_steps", "newton_schulz_steps"),
        *("adam_b1", "adam_b2", "adam_epsilon", "clip_norm"),
    )
    arguments = dict(
        shape=shape,
        recipe={key: getattr(optimizer, key) for key in keys},
        rows=experiment.train.batch_size,
        length=experiment.data.sequence_length,
        parts=experiment.train.grad_accumulation,
        parameters=formulas.parameters(model)["total"],
        attention=attention,
        compile_mode=mode,
        steps=steps,
    )
    name = f"PyTorch {experiment.name}, {attention} attention"
    return Run(name, experiment, "experiments.benchmarks.torch_training", arguments)


def is_plain(experiment: Experiment) -> bool:
    """True for the recipe's model and optimizer with MHA, as torch_training.py implements them."""
    c, first = experiment.model.block, experiment.model.mechanisms[0]
    sizes = ("num_layers", "d_model", "mlp_dim", "max_positions")
    block = BlockConfig(**{key: getattr(c, key) for key in sizes})
    heads = dict.fromkeys(("num_heads", "num_kv_heads", "num_bases"), first.num_heads)
    dims = dict.fromkeys(("key_dim", "value_dim"), first.value_dim)
    mechanism = GroupedConfig(**heads, **dims, rank=0)
    return (
        c == block
        and set(experiment.model.mechanisms) == {mechanism}
        and experiment.optimizer == OptimizerConfig()
    )


def runs_of(
    paths: list[str],
    *,
    changes: list[str],
    rows: int | None,
    steps: int,
    attention: list[str],
    mode: str,
) -> list[Run]:
    """Returns the runs in order: PyTorch with each `attention`, then kvjax with each of `changes`.

    Args:
      attention: empty for no PyTorch runs.

    Raises:
      UserError: as `load`; PyTorch is not installed, has no such attention, or can run none of
        the configs.
    """
    ours = [our_run(path, change, rows, steps) for path in paths for change in changes or [""]]
    if not attention:
        return ours
    if importlib.util.find_spec("torch") is None:
        raise UserError("--torch: PyTorch is not installed; `pip install torch`")
    for name in attention:
        one_of("--torch_attention", name, ATTENTION)
    every = [run.experiment for run in ours[:: len(changes or [""])]]  # a config's first changes
    plain = [experiment for experiment in every if is_plain(experiment)] or every
    return [torch_run(e, name, mode, steps) for e in plain for name in attention] + ours


def figures(run: Run, measured: dict) -> dict:
    """A row of the table without the rates it is compared with; see `with_rates`."""
    seconds, tokens = measured.pop("seconds"), run.experiment.tokens_per_step
    median = statistics.median(seconds)
    flops = formulas.training_flops_per_token(
        run.experiment.model, run.experiment.data.sequence_length
    )
    return dict(
        config=run.name,
        tokens_per_step=tokens,
        tokens_per_second=tokens / median,
        slowest=tokens / max(seconds),
        fastest=tokens / min(seconds),
        gflops=flops * tokens / median / 1e9,
        **measured,
    )


def with_rates(row: dict, rate: float | None, device: datasheets.Device | None) -> dict:
    """A row with `mfu` and `of_matmul`, of its own `count` devices; None if there is nothing known.

    Args:
      rate: FLOP/s of a matrix product on one device.
      device: the datasheet.
    """
    per_device = row["gflops"] * 1e9 / row["count"]
    mfu = per_device / device.bf16_flops if device else None
    return row | dict(mfu=mfu, of_matmul=per_device / rate if rate else None)


def cells(row: dict) -> tuple[str, ...]:
    """A row of the table; empty cells for what is not known."""
    percent = lambda value: "" if value is None else f"{value:.1%}"
    peak = row.get("peak_bytes")
    return (
        row["config"],
        f"{row['tokens_per_second']:,.0f}",
        f"{row['slowest']:,.0f} to {row['fastest']:,.0f}",
        f"{row['gflops']:,.0f}",
        percent(row["mfu"]),
        percent(row["of_matmul"]),
        f"{row['first_step_seconds']:.1f}",
        "" if peak is None else f"{peak / 1e9:.1f}",
        f"{row['loss']:.3f}",
    )


def result_name(device: jax.Device) -> str:
    """Results of a CPU and of every kind of accelerator lie beside each other."""
    if device.platform == "cpu":
        return "train_benchmark"
    sheet = datasheets.for_device(device)
    kind = sheet.name if sheet else re.sub(r"\W+", "_", device.device_kind.lower()).strip("_")
    return f"train_benchmark_{kind}"


def measure(runs: list[Run]) -> tuple[list[dict], list[dict], float | None]:
    """Rows of those that ran, {"config", "error"} of the others, FLOP/s of the matrix product."""
    rows, failed, rates = [], [], []
    for run in runs:
        with progress.waiting(f"timing {run.name}"):
            measured = contender.run(run.module, run.arguments)
        there = {row["platform"] for row in rows} - {measured.get("platform")}
        if "error" not in measured and there:
            platform = measured["platform"]
            measured = dict(error=f"ran on {platform}, others on {there.pop()}: no comparison")
        if "error" in measured:
            failed.append(dict(config=run.name) | measured)
            command_line.say(f"{run.name}: {measured['error']}")
            continue
        rates += measured.pop("matmul_flops", [])
        rows.append(figures(run, measured))
        command_line.say(f"{run.name}: {rows[-1]['tokens_per_second']:,.0f} tokens/s")
    return rows, failed, statistics.mean(rates) if rates else None


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--config", action="append", help="a file to time; may be repeated (all tiny configs)")
    add("--rows", type=int, help="of a step (the config's)")
    text = "keys of every config, 'compute.remat=none'; may be repeated, each is timed by itself"
    add("--set", action="append", default=[], help=text)
    add("--steps", type=int, default=12, help="timed (12)")
    add("--torch", action="store_true", help="time PyTorch, too")
    text = f"of --torch, each timed: a list of {', '.join(ATTENTION)} (flash,cudnn)"
    add("--torch_attention", help=text)
    add("--torch_mode", help=f"of --torch: torch.compile's, of {', '.join(MODES)} (default)")
    add("--save", action="store_true", help="write experiments/results/train_benchmark*.json")
    parser.add_output()
    options = parser.parse(arguments)
    for key in ("torch_attention", "torch_mode"):
        if (value := getattr(options, key)) is not None and not options.torch:
            raise UserError(f"--{key}={value}: is of --torch; leave it out, or add --torch")
    if options.rows is not None:
        at_least("--rows", options.rows, 1)
    at_least("--steps", options.steps, 1)
    attention, mode = options.torch_attention, options.torch_mode
    options.torch_attention = ["flash", "cudnn"] if attention is None else attention.split(",")
    options.torch_mode = "default" if mode is None else mode
    one_of("--torch_mode", options.torch_mode, MODES)
    record.check(options.save)
    return options


def main(arguments: list[str]) -> int:
    """The exit status: 1 if something could not be timed."""
    options = _options(arguments)
    runtime.start()
    runs = runs_of(
        options.config or sorted(map(str, CONFIGS.glob("*_tiny.py"))),
        changes=options.set,
        rows=options.rows,
        steps=options.steps,
        attention=options.torch_attention if options.torch else [],
        mode=options.torch_mode,
    )
    rows, failed, rate = measure(runs)
    device, count = jax.devices()[0], jax.device_count()  # first use of the devices
    sheet = datasheets.for_device(device)
    rows = [with_rates(row, rate, sheet) for row in rows]
    peak = f", datasheet {sheet.bf16_flops / 1e12:.0f} TFLOP/s" if sheet else ""
    if rate:
        peak += f", matrix multiply {rate / 1e9:,.0f} GFLOP/s"
    out = Output(options)
    out.say(f"{count} x {device.device_kind}{peak}")
    out.table(_TITLES, map(cells, rows))
    if any((row["mfu"] or 0) > 1 for row in rows):
        out.say(f"\n{OVER_100}")
    for failure in failed:
        out.say(f"\nfailed: {failure['config']}: {failure['error']}")
    result = dict(
        device=device.device_kind,
        count=count,
        datasheet_flops=sheet and sheet.bf16_flops,
        matmul_gflops=rate and rate / 1e9,
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith("XLA_")},
        rows=rows,
        failed=failed,
    )
    record.record(result_name(device), result, out, save=options.save)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.run(main)
