"""Measures generation of a model in kvjax and in transformers, in turns on one machine.

    make .venv-live/installed
    python -m experiments.benchmarks.beside_transformers --workdir=runs/smollm2 [--save]

The workdir's model is exported for transformers, in float32. Both continue the same prompts
greedily, one sequence at a time, in turns: one prompt for warm-up, then --repeats. Time to first
token starts at the call; decode tokens/s count the tokens after the first. Prints a table of
medians and ranges, and the number of texts that agree token by token.

transformers runs in a process of its own (transformers_generation.py), in the environment of
--python, with PyTorch's own choice of threads and attention; it waits while kvjax runs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile

from etils import epath
import numpy as np

from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option
from kvjax.convert import export, huggingface, into_folder, model as model_lib
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir import trained

PYTHON = Option(
    str(ROOT / ".venv-live/bin/python"), "Python of an environment with torch and transformers"
)
_CHILD = "import sys, transformers_generation as t; t.main(sys.argv[1])"


class Transformers:
    """transformers in a process of its own, with a folder's model."""

    def __init__(self, python: str, folder: pathlib.Path):
        self._process = subprocess.Popen(
            [python, "-c", _CHILD, folder],
            **dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True),
            cwd=pathlib.Path(__file__).parent,  # kvjax is not in that environment
        )
        self.about = self._answer()

    def generate(self, prompt: Sequence[int], num_tokens: int) -> dict:
        """Returns tokens, seconds to the first one, and tokens per second after it."""
        json.dump(dict(prompt=list(prompt), num_tokens=num_tokens), self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"transformers ended with status {self._process.wait()}")
        return json.loads(line)


def _ours(generator: Generator, prompt: Sequence[int], num_tokens: int) -> dict:
    """Generates with kvjax; see `Transformers.generate`."""
    generation = generator.start(
        [list(prompt)], num_tokens=num_tokens, sampling=Sampling(temperature=0.0)
    )
    collections.deque(generation, maxlen=0)
    timing = generation.timing
    rate = timing.decode_tokens_per_second
    return dict(tokens=generation.tokens[0], first=timing.first, decode_tokens_per_second=rate)


def in_turns(
    contenders: Mapping[str, Callable], *, vocab_size: int, prompt: int, new: int, repeats: int
) -> dict[str, list[dict]]:
    """Runs every contender on every prompt; results of the first, warm-up prompt are dropped.

    Args:
      contenders: functions of a prompt and a number of new tokens, by name.
      prompt: number of tokens per prompt.
    """
    runs_by_name: dict[str, list[dict]] = {name: [] for name in contenders}
    rng = np.random.default_rng(0)
    with progress.waiting("generating") as doing:
        for i in range(repeats + 1):
            tokens = rng.integers(0, vocab_size, prompt).tolist()
            for name, generate in contenders.items():
                doing.now(f"{name}: {i} of {repeats}")
                runs_by_name[name].append(generate(tokens, new))
    return {name: runs[1:] for name, runs in runs_by_name.items()}


def agreement(runs: Mapping[str, list[dict]]) -> list[int]:
    """Returns, per prompt, the number of tokens before the first on which contenders differ."""
    counts = []
    for runs_of_prompt in zip(*runs.values(), strict=True):
        pairs = zip(*(run["tokens"] for run in runs_of_prompt), strict=True)
        differ = (i for i, tokens in enumerate(pairs) if len(set(tokens)) > 1)
        counts.append(next(differ, len(runs_of_prompt[0]["tokens"])))
    return counts


def figures(runs: Sequence[dict]) -> dict:
    """Returns median, minimum and maximum of seconds and of tokens per second."""
    by_key = {}
    for key in ("first", "decode_tokens_per_second"):
        values = [run[key] for run in runs]
        by_key[key] = dict(median=statistics.median(values), least=min(values), most=max(values))
    return by_key


def measure(workdir: epath.Path, python: str, sizes: dict) -> tuple[dict, dict]:
    """Returns the runs of kvjax and transformers (see `in_turns`), and transformers' versions."""
    loaded = trained.load(workdir, dtype="float32")
    generator = Generator(loaded.model, loaded.compute)
    dtype = export.DTYPES["float32"]
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "model"
        plan = huggingface.plan(model_lib.TrainedModel(workdir), dtype)
        into_folder.write(plan, epath.Path(folder), dtype)
        with contextlib.closing(Transformers(python, folder)) as theirs:
            ours = functools.partial(_ours, generator)
            contenders = dict(kvjax=ours, transformers=theirs.generate)
            runs = in_turns(contenders, vocab_size=generator.config.vocab_size, **sizes)
    return runs, dict(architecture=plan.title) | theirs.about


def check_python(python: str) -> None:
    """Raises a UserError unless --python is a program."""
    if not shutil.which(python):
        raise UserError(
            f"--python={python} is not a program: `make .venv-live/installed` makes one"
        )


def _measure(options: runner.Options) -> dict:
    sizes = dict(prompt=options.prompt_tokens, new=options.num_tokens, repeats=options.repeats)
    workdir = trained.find(options.workdir).workdir
    check_python(options.python)
    runs, about = measure(workdir, options.python, sizes)
    by_name = {name: figures(own) for name, own in runs.items()}
    result = dict(workdir=workdir.name, **sizes, figures=by_name, tokens_alike=agreement(runs))
    return result | about


def _rate(key: str) -> Callable[[Mapping], str]:
    return lambda row: f"{row['decode_tokens_per_second'][key]:.1f} /s"


_COLUMNS = {
    "": "{name}",
    "first token": lambda row: f"{1e3 * row['first']['median']:,.0f} ms",
    "decode": _rate("median"),
    "least": _rate("least"),
    "most": _rate("most"),
}


def _show(result: dict, out: Output) -> None:
    prompt, new, alike = (result[key] for key in ("prompt", "new", "tokens_alike"))
    out.say(f"{result['architecture']}, float32: prompts of {prompt} tokens, {new} generated")
    rows = [dict(name=name) | own for name, own in result["figures"].items()]
    out.table(*runner.table(_COLUMNS, rows))
    equal = sum(count == new for count in alike)
    out.say(f"{equal} of {len(alike)} texts are the same, token by token")


main = runner.benchmark(
    "beside_transformers",
    __doc__,
    dict(
        workdir=Option("runs/smollm2", "workdir of the model"),
        python=PYTHON,
        prompt_tokens=Option(64, "tokens of each prompt", least=1),
        num_tokens=Option(128, "tokens generated after each, at least 2", least=2),
        repeats=Option(5, "prompts that are measured", least=1),
    ),
    _measure,
    _show,
)

if __name__ == "__main__":
    command_line.run(main)
