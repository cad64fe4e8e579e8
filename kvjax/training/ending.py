"""Ends a run: draws curves, writes a sample, and prints the last figures.

The first process does this, after checkpoint and records have been saved.
"""

from collections.abc import Callable, Sequence
from signal import Signals

from etils import epath
from flax import nnx
import jax

from kvjax import distributed
from kvjax.attention import family
from kvjax.decoding.generator import Generator, max_positions
from kvjax.decoding.text import generate
from kvjax.foundation import progress, runtime
from kvjax.foundation.errors import UserError, first_line, warn
from kvjax.foundation.files import write_atomically
from kvjax.model.transformer import compute_dtypes
from kvjax.training.preflight import PreparedRun
from kvjax.workdir import metrics as metrics_lib
from kvjax.workdir.checkpoint import CHECKPOINTS, read_parameters


def write(
    run: PreparedRun,
    graph: nnx.GraphDef,
    params: dict,
    folder: epath.Path,
    evaluations: Sequence[dict],
) -> dict[str, float]:
    """Writes curves and sample, prints the last figures, and returns the last evaluation.

    Args:
      graph: the model without its parameters `params`.
      folder: local folder with metrics.jsonl: the workdir, or its copy if that is in a bucket.
      evaluations: records of metrics.jsonl, at least one.
    """
    last, e = evaluations[-1], run.experiment
    yardstick = run.dataset.info["xz_bits_per_byte"]

    def curves():
        metrics_lib.draw_curves(
            run.workdir,
            title=e.name,
            yardstick=yardstick,
            mechanism=family(e.model.mechanisms[0]),
            folder=folder,
        )

    _write(run.workdir / "curves.png", curves)
    if e.train.sample_tokens:
        try:
            with progress.waiting("writing a sample"):
                text = _sample(run, graph, params)
            path = run.workdir / "sample.txt"
            _write(path, lambda: write_atomically(path, text + "\n"))
            print(f"\n--- sample ---\n{text}\n--------------\n")
        except UserError as error:  # the weights may be NaN; the run is saved
            warn(f"no sample: {error}")
    print(
        f"validation: {last['validation_bpb']:.4f} bits per byte after {last['tokens']:,} "
        f"tokens (xz -9e on the same text: {yardstick:.4f}); "
        f"{runtime.seconds_since_launch():.0f} s in this process\n"
        f"curves, metrics, sample and checkpoints: {run.workdir}\n"
        f"with `pip install tensorboard`: tensorboard --logdir {run.workdir}"
    )
    return last


def stopped(step: int, num_steps: int, signal: Signals | None) -> str:
    """Returns the last line of a run that ends before its last step.

    Args:
      signal: the signal that ended it; None: `train.stop_after` did.
    """
    where = f"at step {step} of {num_steps}, saved" if step else "before the first step"
    why = f"on {signal.name}" if signal else "by train.stop_after"
    return f"Stopped {why} {where}. The same command goes on from there."


def _write(path: epath.Path, write: Callable[[], object]) -> None:
    """Writes a file; a failure is only a warning, since the run itself is saved."""
    try:
        write()
    except Exception as error:  # bucket clients and matplotlib raise many types
        warn(f"{path} was not written: {first_line(error)}")


def _sample(run: PreparedRun, graph: nnx.GraphDef, params: dict) -> str:
    """Returns config.train.sample_prompt and its continuation, up to the model's longest row."""
    e, tokenizer = run.experiment, run.dataset.tokenizer
    prompt = e.train.sample_prompt
    num_tokens, limit = e.train.sample_tokens, max_positions(e.model)
    if limit is not None:
        num_tokens = min(num_tokens, limit - len(tokenizer.encode(prompt)))
    if num_tokens < 1:
        return prompt
    if distributed.count() > 1:  # no process holds all parameters: read them from the checkpoint
        sharding = jax.sharding.SingleDeviceSharding(run.mesh.local_devices[0])
        abstract = jax.tree.map(
            lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
            params,
            compute_dtypes(params, run.compute.dtype),
        )
        params = read_parameters(run.workdir / CHECKPOINTS, e.train.num_steps, abstract)
    text = generate(
        Generator(nnx.merge(graph, params), run.compute),
        tokenizer,
        [prompt],
        num_tokens=num_tokens,
        seed=e.train.seed,
        end_at_special=False,
    ).texts[0]
    return prompt + text.replace(tokenizer.decode([tokenizer.bos_id]), "\n\n")
