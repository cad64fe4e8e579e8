"""Peak memory and time of converting a model as large as Mistral 7B.

    python -m experiments.benchmarks.conversion_memory [--save]

A published model of that shape is made first: random weights in bfloat16, in files of 4 GB, 14 GB
in all. Then `python -m kvjax.convert` imports it as it is, and with its cache made smaller, by its
weights and by text (calibrated, and perplexity before and after: 512 tokens of each). What counts
is the highest anonymous memory of that process: files that are read and written lie in the system's
cache besides, which gives way. Prints a table. Needs Linux, and 45 GB of disk.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile

from etils import epath

from experiments import record
from experiments.benchmarks import machine, watched
from experiments.benchmarks.random_model import RandomModel
from kvjax.attention import GroupedConfig
from kvjax.convert import huggingface, into_folder
from kvjax.foundation import command_line, progress
from kvjax.foundation.configuration import at_least
from kvjax.foundation.output import Output
from kvjax.model.config import BlockConfig, TransformerConfig

_BY_WEIGHTS = ("--objective=weights", "--evaluate_tokens=0")
# Few tokens: memory is asked for, and random weights say nothing about text.
_BY_TEXT = ("--calibrate_tokens=512", "--evaluate_tokens=512", "--row_length=128")
RUNS = {
    "as it is": (),
    "thin keys of rank 64, by weights": ("--method=thin_keys", "--rank=64", *_BY_WEIGHTS),
    "LRKV of rank 64, by weights": ("--method=lrkv", "--rank=64", *_BY_WEIGHTS),
    "thin keys of rank 64, by text": ("--method=thin_keys", "--rank=64", *_BY_TEXT),
}
_ROWS = 32_000  # of the embedding


def mistral(layers: int) -> RandomModel:
    """A random model of the shape of Mistral 7B (arXiv 2310.06825), with so many layers."""
    block = BlockConfig(
        **dict(num_layers=layers, d_model=4096, mlp_dim=14_336, norm_gain=True),
        **dict(embedding_norm=False, activation="swiglu", logit_softcap=0.0),
        **dict(rope_base=10_000.0, norm_epsilon=1e-5, window=4096),
    )
    heads = dict(num_heads=32, num_kv_heads=8, num_bases=8, key_dim=128, value_dim=128)
    attention = GroupedConfig(**heads, rank=0, qk_norm="none")
    transformer = TransformerConfig(block=block, mechanisms=(attention,) * layers, vocab_size=_ROWS)
    return RandomModel("random_mistral", transformer, context=8192)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=32, help="of the model (32)")
    add("--save", action="store_true", help="write experiments/results/conversion_memory.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--layers", options.layers, 1)
    watched.check()
    record.check(options.save)
    return options


def measure(source: pathlib.Path, out: pathlib.Path, given: tuple[str, ...]) -> dict:
    """One conversion in a process of its own: seconds, and bytes of memory and of files."""
    command = [sys.executable, "-m", "kvjax.convert", f"--source={source}", f"--out={out}"]
    found = watched.run([*command, *given])
    return found | dict(written=sum(f.stat().st_size for f in out.rglob("*") if f.is_file()))


def main(arguments: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    options = _options(arguments)
    out, model, rows = Output(options), mistral(options.layers), {}
    plan = huggingface.plan(model, "BF16")
    size = into_folder.size(plan, "BF16")
    machine.check_room(f"--layers={options.layers}", size, memory=0, disk=3)
    with tempfile.TemporaryDirectory() as folder, progress.waiting("making a model") as doing:
        source = pathlib.Path(folder) / "source"
        into_folder.write(plan, epath.Path(source), "BF16")
        for name, given in RUNS.items():
            doing.now(name)
            target = pathlib.Path(folder) / "out"
            rows[name] = measure(source, target, given)
            shutil.rmtree(target)
    gb = lambda count: f"{count / 1e9:.2f}"
    out.say(f"Converting {gb(size)} GB of {options.layers} layers, random weights in bfloat16")
    header = ["", "seconds", "GB anonymous", "GB resident", "GB written"]
    kinds = ("anonymous", "resident", "written")
    out.table(
        header,
        [[n, f"{r['seconds']:.0f}", *(gb(r[kind]) for kind in kinds)] for n, r in rows.items()],
    )
    result = dict(layers=options.layers, bytes=size, runs=rows)
    record.record("conversion_memory", result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
