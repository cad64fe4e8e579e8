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
import subprocess
import sys
import tempfile
import time
import zlib

from etils import epath
import ml_dtypes
import numpy as np
import tokenizers

from experiments import record
from experiments.benchmarks import machine
from kvjax.attention import GroupedConfig
from kvjax.convert import huggingface
from kvjax.convert import into_folder
from kvjax.convert import model as model_lib
from kvjax.data import tokenizer
from kvjax.foundation import command_line
from kvjax.foundation import progress
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.model import parameters
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path

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
_EVERY = 0.2  # seconds between two looks at a process's memory


class Mistral:
    """A model of random weights in the shape of Mistral 7B (arXiv 2310.06825); see `Model`."""

    name, context, chat_template, token_files = "random_mistral", 8192, None, {}

    def __init__(self, layers: int):
        block = BlockConfig(
            **dict(num_layers=layers, d_model=4096, mlp_dim=14_336, norm_gain=True),
            **dict(embedding_norm=False, activation="swiglu", logit_softcap=0.0),
            **dict(rope_base=10_000.0, norm_epsilon=1e-5, window=4096),
        )
        heads = dict(num_heads=32, num_kv_heads=8, num_bases=8, key_dim=128, value_dim=128)
        attention = GroupedConfig(**heads, rank=0, qk_norm="none")
        self.transformer = TransformerConfig(
            block=block, mechanisms=(attention,) * layers, vocab_size=_ROWS
        )
        self.tokenizer_json = tokenizer_json(_ROWS)
        self._shapes = parameters.shapes(self.transformer)
        normal = np.random.default_rng(0).standard_normal(1 << 26, np.float32)
        self._numbers = (0.02 * normal).astype(ml_dtypes.bfloat16)

    def parameters(self) -> model_lib.Parameters:
        return {path: (shape, self._numbers.dtype) for path, shape in self._shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        shape = self._shapes[path] if layer is None else self._shapes[path][1:]
        first = zlib.crc32(f"{path} {layer}".encode()) % 1000
        return np.resize(self._numbers[first:], shape)


def tokenizer_json(tokens: int) -> str:
    """Of bytes, with tokens beside them that no text has."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.byte_tokenizer().to_json())
    backend.add_tokens([f"<{i}>" for i in range(backend.get_vocab_size(), tokens)])
    return backend.to_str()


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=32, help="of the model (32)")
    add("--save", action="store_true", help="write experiments/results/conversion_memory.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--layers", options.layers, 1)
    if not pathlib.Path("/proc/self/status").exists():
        raise UserError("/proc is not there: only Linux tells a process's anonymous memory")
    record.check(options.save)
    return options


def measure(source: pathlib.Path, out: pathlib.Path, given: tuple[str, ...]) -> dict:
    """One conversion in a process of its own: seconds and its highest bytes of memory."""
    command = [sys.executable, "-m", "kvjax.convert", f"--source={source}", f"--out={out}"]
    command += given
    begun, peak = time.perf_counter(), dict(RssAnon=0, VmRSS=0)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            for name, size in _memory(process.pid).items():
                peak[name] = max(peak[name], size)
            time.sleep(_EVERY)
        log.seek(0)
        if process.returncode:
            raise UserError(f"{' '.join(command)}: {log.read()[-500:]}")
    files = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    seconds = time.perf_counter() - begun
    return dict(seconds=seconds, anonymous=peak["RssAnon"], resident=peak["VmRSS"], written=files)


def _memory(pid: int) -> dict[str, int]:
    """Bytes of anonymous and of all resident memory of a process; none of one that has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = dict(line.split(":", 1) for line in status.splitlines())
    wanted = [name for name in ("RssAnon", "VmRSS") if name in lines]
    return {name: 1024 * int(lines[name].split()[0]) for name in wanted}


def main(arguments: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    options = _options(arguments)
    out, model, rows = Output(options), Mistral(options.layers), {}
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
