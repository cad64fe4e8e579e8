"""What a run leaves behind its last step: curves, a sample, and a line of figures.

Of several processes the first one writes it. Everything that matters is saved before.
"""

from collections.abc import Callable, Sequence

from etils import epath
from flax import nnx
import jax

from kvjax import distributed
from kvjax.decoding.generator import Generator, max_positions
from kvjax.decoding.text import generate
from kvjax.foundation import progress, runtime
from kvjax.foundation.errors import first_line, warn
from kvjax.foundation.files import write_atomically
from kvjax.model.transformer import compute_dtypes
from kvjax.training.preflight import PreparedRun
from kvjax.workdir import metrics as metrics_lib
from kvjax.workdir.checkpoint import CHECKPOINTS, read_parameters


def write(
    given: PreparedRun,
    graph: nnx.GraphDef,
    params: dict,
    folder: epath.Path,
    evaluations: Sequence[dict],
) -> dict[str, float]:
    """Writes curves and sample, and says the last figures; those of the last evaluation.

    Args:
      graph: of the model, with the parameters `params`.
      folder: where records are read fastest.
      evaluations: records, at least one.
    """
    last, e = evaluations[-1], given.experiment
    yardstick = given.dataset.info["xz_bits_per_byte"]
    options = dict(title=e.name, yardstick=yardstick, folder=folder)
    draw = lambda: metrics_lib.draw_curves(given.workdir, **options)
    _write(given.workdir / "curves.png", draw)
    if e.train.sample_tokens:
        with progress.waiting("writing a sample"):
            text = _sample(given, graph, params)
        path = given.workdir / "sample.txt"
        _write(path, lambda: write_atomically(path, text + "\n"))
        print(f"\n--- sample ---\n{text}\n--------------\n")
    print(
        f"validation: {last['validation_bpb']:.4f} bits per byte after {last['tokens']:,} "
        f"tokens (xz -9e on the same text: {yardstick:.4f}); "
        f"{runtime.seconds_since_launch():.0f} s in this process\n"
        f"curves, metrics, sample and checkpoints: {given.workdir}\n"
        f"with `pip install tensorboard`: tensorboard --logdir {given.workdir}"
    )
    return last


def _write(path: epath.Path, write: Callable[[], object]) -> None:
    """Writes a file; a failure is a warning, for all that matters is saved before."""
    try:
        write()
    except Exception as error:  # clients of buckets and libraries that draw raise many types
        warn(f"{path} was not written: {first_line(error)}")


def _sample(given: PreparedRun, graph: nnx.GraphDef, params: dict) -> str:
    """config.train.sample_prompt and what follows it, as far as the model has positions."""
    e, tokenizer = given.experiment, given.dataset.tokenizer
    prompt = e.train.sample_prompt
    num_tokens, limit = e.train.sample_tokens, max_positions(e.model)
    if limit is not None:
        num_tokens = min(num_tokens, limit - len(tokenizer.encode(prompt)))
    if num_tokens < 1:
        return prompt
    if distributed.count() > 1:  # no process has all of them
        one = jax.sharding.SingleDeviceSharding(given.mesh.local_devices[0])
        place = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=one)
        asked = jax.tree.map(place, params, compute_dtypes(params, given.compute.dtype))
        params = read_parameters(given.workdir / CHECKPOINTS, e.train.num_steps, asked)
    generator = Generator(nnx.merge(graph, params), given.compute)
    options = dict(num_tokens=num_tokens, seed=e.train.seed, end_at_special=False)
    text = generate(generator, tokenizer, [prompt], **options).texts[0]
    return prompt + text.replace(tokenizer.decode([tokenizer.bos_id]), "\n\n")
