"""Compares kvjax's mechanisms with their authors' code, with the same weights.

    make .venv-live/installed
    python -m experiments.benchmarks.authors_code --peers=FOLDER [--only=MLRA,TPA] [--save]

The authors' attention modules are in clones of their repositories in FOLDER, at the commits of
`authors/clones.py`; DeepSeek's is in transformers. If a clone is missing, the message has the
command that makes it. The authors' code runs in the environment of --python, with random weights,
in float64. kvjax copies the weights and computes whole rows, and tokens one by one from its cache.
The authors' caches are compared as well. A difference is the largest over all outputs, relative to
the token's largest output. Exits with 1 for an unexpected outcome. FlashAttention, and packages
that the attention modules do not need, are replaced by stand-ins; the tables name them. The
authors' code is not part of this repository.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import subprocess
import tempfile

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import runner
from experiments.benchmarks.authors import clones
from experiments.benchmarks.authors.comparisons import ALL, Comparison
from experiments.benchmarks.beside_transformers import PYTHON, check_python
from experiments.benchmarks.runner import Option
from kvjax import cache as cache_lib
from kvjax.attention import Attention
from kvjax.foundation import command_line, lists, progress, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table
from kvjax.layers import rope

EQUAL = 1e-12  # some thousand times float64's rounding
_CHILD = "import sys; from experiments.benchmarks.authors import theirs; theirs.main(sys.argv[1])"
HEADER = dict(rows="whole rows", cache="our cache", their_cache="their cache")


def attention(comparison: Comparison, weights: Mapping[str, np.ndarray], width: int) -> Attention:
    """Returns kvjax's module with the authors' weights, float64.

    Raises:
      ValueError: names or shapes differ from kvjax's.
    """
    module = nnx.eval_shape(lambda: Attention(comparison.config, width, rngs=nnx.Rngs(0)))
    copied = comparison.copy(dict(weights), comparison.config)
    state = nnx.state(module)
    variables = {
        ".".join(path).removeprefix("mechanism."): variable
        for path, variable in nnx.to_flat_state(state)
    }
    shapes = {name: value.shape for name, value in copied.items()}
    expected = {name: variable.shape for name, variable in variables.items()}
    if shapes != expected:
        different = sorted(name for name, _ in shapes.items() ^ expected.items())
        raise ValueError(f"copied weights differ in name or shape: {', '.join(different)}")
    for name, variable in variables.items():
        variable.set_value(jnp.asarray(copied[name], jnp.float64))
    nnx.update(module, state)
    return module


def outputs(comparison: Comparison, module: Attention, x_BTD: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns outputs [B, T, D] of whole rows, and the same from the cache."""
    graph, weights = nnx.split(module)
    config, base, window = comparison.config, comparison.rope, comparison.window
    B, T, _ = x_BTD.shape

    @jax.jit
    def rows(weights, x_BTD):
        positions = rope.positions(np.arange(T, dtype=np.int32)[None], config.rope_dim, base)
        return nnx.merge(graph, weights)(x_BTD, positions, causal=True, window=window)

    @jax.jit
    def step(weights, x_B1D, layer, t):
        positions = rope.positions(jnp.full((B, 1), t, jnp.int32), config.rope_dim, base)
        options = dict(rope_base=base, window=window)
        one_B = jnp.ones((B,), jnp.int32)
        return nnx.merge(graph, weights).decode(x_B1D, positions, layer, one_B, **options)

    layer = cache_lib.allocate([config], batch=B, capacity=T, dtype=jnp.float64).layers[0]
    decoded = []
    for t in range(T):
        y_B1D, layer = step(weights, x_BTD[:, t : t + 1], layer, t)
        decoded.append(y_B1D)
    return np.asarray(rows(weights, x_BTD)), np.concatenate(decoded, axis=1)


def difference(ours_BTD: np.ndarray, theirs_BTD: np.ndarray) -> float:
    """Returns the largest difference of an output, relative to the token's largest output."""
    scale_BT1 = np.abs(theirs_BTD).max(-1, keepdims=True)
    return float((np.abs(ours_BTD - theirs_BTD) / scale_BT1).max())


def compare(comparison: Comparison, arrays: Mapping[str, np.ndarray]) -> dict:
    """Returns differences of whole rows and of both caches from the authors' whole rows.

    Args:
      arrays: the arrays of `theirs.outputs`.
    """
    start = "weights/"
    weights = {n.removeprefix(start): w for n, w in arrays.items() if n.startswith(start)}
    x_BTD, y_BTD = arrays["x"], arrays["y"]
    with jax.enable_x64(True):
        module = attention(comparison, weights, x_BTD.shape[-1])
        rows_BTD, cached_BTD = outputs(comparison, module, x_BTD)
    result = dict(rows=difference(rows_BTD, y_BTD), cache=difference(cached_BTD, y_BTD))
    if "cached" in arrays:
        result["their_cache"] = difference(rows_BTD, arrays["cached"])
    if "cached_error" in arrays:
        result["their_cache"] = str(arrays["cached_error"])
    return result


def _theirs(python: str, cases: Sequence[dict], out: pathlib.Path) -> dict:
    """Runs the cases of one repository in a child process; returns its versions and errors."""
    child = subprocess.run(
        [python, "-c", _CHILD, out],
        input=json.dumps(cases),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    about = out / "about.json"
    if child.returncode or not about.is_file():
        message = child.stderr.strip().rpartition("\n")[2]
        raise UserError(f"--python={python} ended with status {child.returncode}: {message}")
    return json.loads(about.read_text())


def measure(
    python: str, folder: pathlib.Path, peers: Sequence[str]
) -> tuple[list[dict], dict[str, dict]]:
    """Returns a row for each comparison, and each repository's name, versions and replacements.

    If their code raises, the error text replaces the difference.
    """
    results, about = [], {}
    with progress.waiting("comparing") as doing, tempfile.TemporaryDirectory() as parent:
        for peer in peers:
            chosen = {str(i): c for i, c in enumerate(ALL) if c.peer == peer}
            doing.now(f"{peer}: {len(chosen)} modules of theirs")
            out = pathlib.Path(parent, peer)
            out.mkdir()
            cases = [c.case(int(i), str(folder / peer)) for i, c in chosen.items()]
            their_about = _theirs(python, cases, out)
            errors = their_about.pop("errors")
            name = clones.PEERS[peer].name(peer) if peer in clones.PEERS else peer
            about[peer] = dict(name=name) | their_about
            for i, comparison in chosen.items():
                doing.now(f"{peer}: {comparison.title}")
                if i in errors:
                    differences = dict(rows=errors[i])
                else:
                    with np.load(out / f"{i}.npz") as arrays:
                        differences = compare(comparison, dict(arrays))
                keys = ("peer", "title", "file", "outcome", "why")
                results.append({key: getattr(comparison, key) for key in keys} | differences)
    return results, about


def outcome(row: dict) -> str:
    """Returns "raises", "equal" or "differs"; adds ", its cache raises" for the authors' cache."""
    if isinstance(row["rows"], str):
        return "raises"
    numbers = [row[key] for key in HEADER if isinstance(row.get(key), float)]
    verdict = "equal" if max(numbers) < EQUAL else "differs"
    return verdict + (", its cache raises" if isinstance(row.get("their_cache"), str) else "")


def tables(result: dict) -> list[Table]:
    """Returns a table for each repository; notes say why a module differs or raises."""
    made = []
    for peer, about in result["peers"].items():
        rows = [row for row in result["results"] if row["peer"] == peer]
        cells, notes = [], []
        for row in rows:
            values = [row.get(key, "") for key in HEADER]
            cells.append((row["title"], _stem(row["file"]), *map(_shown, values)))
            reasons = [text for text in (row["why"], *values) if isinstance(text, str) and text]
            if reasons:
                notes.append(f"{row['title']}: {'; '.join(reasons)}")
        title = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        if about["replaced"]:
            title += f"; replaced: {', '.join(about['replaced'])}"
        header = ("compared", "file", *HEADER.values())
        made.append(Table(f"\n{about['name']}: {title}", header, cells, notes))
    return made


def _stem(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def _shown(value: float | str) -> str:
    return f"{value:.1e}" if isinstance(value, float) else "raises" if value else ""


def show(result: dict, out: Output) -> None:
    """Prints the tables and how many comparisons are equal."""
    for table in tables(result):
        out.show(table)
    rows = result["results"]
    equal = sum(outcome(row).startswith("equal") for row in rows)
    out.say(f"\n{equal} of {len(rows)} are equal to {EQUAL:.0e} of a row's largest output.")
    if unexpected := _unexpected(result):
        out.say(f"Unexpected outcomes: {', '.join(unexpected)}")


_KNOWN = (*clones.PEERS, "transformers")


def _check(options: runner.Options) -> None:
    if options.save and set(options.only) != set(_KNOWN):
        raise UserError("--save: a result has all repositories; leave --only out")
    cloned = [name for name in options.only if name in clones.PEERS]
    if cloned and not options.peers:
        raise UserError(f"--peers is missing: give the folder with clones of {', '.join(cloned)}")
    runtime.path("--peers", options.peers)  # refuses a name that no file system takes
    for name in cloned:
        clones.PEERS[name].check(pathlib.Path(options.peers, name))
    check_python(options.python)


def _measure(options: runner.Options) -> dict:
    results, peers = measure(options.python, pathlib.Path(options.peers), options.only)
    return dict(peers=peers, results=results)


def _unexpected(result: dict) -> list[str]:
    return [row["title"] for row in result["results"] if outcome(row) != row["outcome"]]


main = runner.benchmark(
    "authors_code",
    __doc__,
    dict(
        peers=Option("", "folder of the clones; --only=transformers needs none"),
        only=Option(
            ",".join(_KNOWN),
            "repositories, separated by commas",
            parse=lambda option, text: lists.names(option, text, _KNOWN),
        ),
        python=PYTHON,
    ),
    _measure,
    show,
    check=_check,
    status=lambda result: bool(_unexpected(result)),
)

if __name__ == "__main__":
    command_line.run(main)
