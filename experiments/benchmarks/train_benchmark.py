"""Measures training speed: tokens/s, MFU, and the share of the machine's matmul rate.

    python -m experiments.benchmarks.train_benchmark [--config=configs/mha_tiny.py ...] [--save]
    python -m experiments.benchmarks.train_benchmark --config=configs/mha_128m.py \\
        --config=configs/lrkv_128m.py --rows=32 --set=compute.remat=none --torch --save  # on a GPU

Times whole training steps, optimizer included, on one batch of random tokens: the median and range
of --steps after warm-up. Each --set is a space-separated list of overrides for every config, and is
timed separately. For each MHA config --torch adds a plain PyTorch model of the same shape, compiled
by `torch.compile` (torch_training.py), with the batch of the first --set. Runs follow each other,
PyTorch's first, each in a process of its own. Failed runs are listed at the end, and the exit
status is then 1.

FLOPs are `costs.formulas.training_flops_per_token` (attention over all keys; rematerialisation and
the optimizer are not counted). MFU is relative to the datasheet's bfloat16 peak, if the device has
a datasheet. The other share is relative to a square matrix product in the compute dtype, measured
before and after each kvjax run. Peak memory is the peak of the library's allocator. Prints a table;
--save writes experiments/results/train_benchmark.json, or train_benchmark_DEVICE.json for
accelerators.
"""

from collections.abc import Callable
import dataclasses
import importlib.util
import os
import re
import statistics

import jax

from experiments.benchmarks import contender, runner
from experiments.benchmarks.jax_training import load
from experiments.benchmarks.runner import Option
from kvjax.aot.tables import OVER_100
from kvjax.attention import GroupedConfig
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets
from kvjax.model.config import BlockConfig
from kvjax.optim import OptimizerConfig

ATTENTION = ("flash", "cudnn", "default")  # PyTorch's
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table: a training program and its arguments."""

    name: str
    experiment: Experiment
    module: str
    arguments: dict


def our_run(path: str, changes: str, rows: int | None, steps: int) -> Run:
    """Returns the run of a config with changed keys ("a.b=1 c.d=2").

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
    """Returns the run of the PyTorch model of the experiment's shape.

    Raises:
      UserError: torch_training.py does not implement the experiment's model or optimizer.
    """
    model, optimizer = experiment.model, experiment.optimizer
    if not is_plain(experiment):
        raise UserError(
            f"--torch: {experiment.name} is not the recipe's MHA, the only model of "
            "experiments/benchmarks/torch_training.py: give a config like configs/mha_128m.py"
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
    """Returns True for the recipe's MHA model and optimizer, which torch_training.py implements."""
    c, mechanism = experiment.model.block, experiment.model.mechanisms[0]
    sizes = ("num_layers", "d_model", "mlp_dim", "max_positions")
    plain_block = BlockConfig(**{key: getattr(c, key) for key in sizes})
    heads = dict.fromkeys(("num_heads", "num_kv_heads", "num_bases"), mechanism.num_heads)
    dims = dict.fromkeys(("key_dim", "value_dim"), mechanism.value_dim)
    plain_mechanism = GroupedConfig(**heads, **dims, rank=0)
    return (
        c == plain_block
        and set(experiment.model.mechanisms) == {plain_mechanism}
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
      UserError: see `load`; or PyTorch is not installed, or the attention is unknown, or PyTorch
        can run none of the configs.
    """
    our_runs = [our_run(path, change, rows, steps) for path in paths for change in changes or [""]]
    if not attention:
        return our_runs
    if importlib.util.find_spec("torch") is None:
        raise UserError("--torch: PyTorch is not installed; `pip install torch`")
    for name in attention:
        one_of("--torch_attention", name, ATTENTION)
    experiments = [
        run.experiment for run in our_runs[:: len(changes or [""])]
    ]  # a config's first changes
    plain = [experiment for experiment in experiments if is_plain(experiment)] or experiments
    return [torch_run(e, name, mode, steps) for e in plain for name in attention] + our_runs


def figures(run: Run, measured: dict) -> dict:
    """Returns a row of the table without `mfu` and `of_matmul`, see `with_rates`."""
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
    """Returns a row with `mfu` and `of_matmul` per device; None where no peak is known.

    Args:
      rate: FLOP/s of a matrix product on one device.
      device: the datasheet.
    """
    per_device = row["gflops"] * 1e9 / row["count"]
    mfu = per_device / device.bf16_flops if device else None
    return row | dict(mfu=mfu, of_matmul=per_device / rate if rate else None)


def _percent(key: str) -> Callable[[dict], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.1%}"


COLUMNS = {  # empty cells where a value is not known
    "config": "{config}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "range": "{slowest:,.0f} to {fastest:,.0f}",
    "GFLOP/s": "{gflops:,.0f}",
    "MFU": _percent("mfu"),
    "of matrix multiply": _percent("of_matmul"),
    "first step, s": "{first_step_seconds:.1f}",
    "GB at most": lambda row: f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else "",
    "loss": "{loss:.3f}",
}


def result_name(device: jax.Device) -> str:
    """Returns the name of a device's record: one for CPUs, one for each kind of accelerator."""
    if device.platform == "cpu":
        return "train_benchmark"
    sheet = datasheets.for_device(device)
    kind = sheet.name if sheet else re.sub(r"\W+", "_", device.device_kind.lower()).strip("_")
    return f"train_benchmark_{kind}"


def measure(runs: list[Run]) -> tuple[list[dict], list[dict], float | None]:
    """Returns rows, {"config", "error"} of failed runs, and FLOP/s of a matrix product."""
    rows, failed, rates = [], [], []
    for run in runs:
        with progress.waiting(f"timing {run.name}"):
            measured = contender.run(run.module, run.arguments)
        other_platforms = {row["platform"] for row in rows} - {measured.get("platform")}
        if "error" not in measured and other_platforms:
            platform = measured["platform"]
            measured = dict(
                error=f"ran on {platform}, others on {other_platforms.pop()}: no comparison"
            )
        if "error" in measured:
            failed.append(dict(config=run.name) | measured)
            command_line.say(f"{run.name}: {measured['error']}")
            continue
        rates += measured.pop("matmul_flops", [])
        rows.append(figures(run, measured))
        command_line.say(f"{run.name}: {rows[-1]['tokens_per_second']:,.0f} tokens/s")
    return rows, failed, statistics.mean(rates) if rates else None


def _check(options: runner.Options) -> None:
    for key in ("torch_attention", "torch_mode"):
        if (value := getattr(options, key)) and not options.torch:
            raise UserError(f"--{key}={value}: needs --torch; leave it out, or add --torch")
    options.runs = runs_of(
        options.config or sorted(map(str, CONFIGS.glob("*_tiny.py"))),
        changes=options.set,
        rows=options.rows,
        steps=options.steps,
        attention=(options.torch_attention or "flash,cudnn").split(",") if options.torch else [],
        mode=options.torch_mode or "default",
    )


def _measure(options: runner.Options) -> dict:
    rows, failed, rate = measure(options.runs)
    device, count = jax.devices()[0], jax.device_count()  # first use of the devices
    sheet = datasheets.for_device(device)
    return dict(
        device=device.device_kind,
        count=count,
        datasheet_flops=sheet and sheet.bf16_flops,
        matmul_gflops=rate and rate / 1e9,
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith("XLA_")},
        rows=[with_rates(row, rate, sheet) for row in rows],
        failed=failed,
    )


def _show(result: dict, out: Output) -> None:
    flops, rate = result["datasheet_flops"], result["matmul_gflops"]
    peak = f", datasheet {flops / 1e12:.0f} TFLOP/s" if flops else ""
    peak += f", matrix multiply {rate:,.0f} GFLOP/s" if rate else ""
    out.say(f"{result['count']} x {result['device']}{peak}")
    out.table(*runner.table(COLUMNS, result["rows"]))
    if any((row["mfu"] or 0) > 1 for row in result["rows"]):
        out.say(f"\n{OVER_100}")
    for failure in result["failed"]:
        out.say(f"\nfailed: {failure['config']}: {failure['error']}")


main = runner.benchmark(
    lambda options: result_name(jax.devices()[0]),
    __doc__,
    dict(
        config=Option([], "a file to time; may be repeated (all tiny configs)"),
        rows=Option(None, "rows of a step (the config's)", kind=int, least=1),
        set=Option(
            [], "keys of every config, 'compute.remat=none'; may be repeated, each timed separately"
        ),
        steps=Option(12, "timed steps", least=1),
        torch=Option(False, "also time PyTorch"),
        torch_attention=Option(
            "", f"attention of --torch, a list of {', '.join(ATTENTION)} (flash,cudnn)"
        ),
        torch_mode=Option("", "torch.compile's mode for --torch (default)", known=MODES),
    ),
    _measure,
    _show,
    check=_check,
    status=lambda result: bool(result["failed"]),
)

if __name__ == "__main__":
    command_line.run(main)
