"""Five optimizer steps of every mechanism's tiny config give the numbers they always gave.

All but initialisation and Newton-Schulz is in float64: in float32, processors that round
differently would be 3e-4 apart after four steps.

    python tests/training/test_golden_steps.py --write [NAME ...]

rewrites them for all mechanisms, or for the named ones, which may be new. Do so if a commit changes
on purpose what a model computes, how it is initialised or how it is trained; a refactoring must not
need it.
"""

import functools
import json
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import config_files, config_label, load_config
from kvjax.model import parameters
from kvjax.model.transformer import Compute, Transformer
from kvjax.optim import make_optimizer
from kvjax.training.program import train_step

GOLDEN = ROOT / "tests" / "goldens" / "training_steps.json"
_TINY = {
    config_label(path).removesuffix("_tiny"): path
    for path in config_files()
    if path.match("*_tiny.py") or path.match("rivals.py:*_tiny")
}
# Of a rival that has both sizes, only the narrow one.
CONFIGS = {
    name: path
    for name, path in sorted(_TINY.items())
    if not (name.endswith("_wide") and f"{name.removesuffix('_wide')}_narrow" in _TINY)
}
B, T, STEPS = 2, 32, 5


def _figures(mechanism):
    """Returns [loss, gradient norm] of each step. Queries and keys first change in step 4."""
    run = config_lib.resolve(load_config(CONFIGS[mechanism]))
    axes = parameters.abstract(run.model).axes
    optimizer = make_optimizer(
        run.optimizer,
        axes,
        d_model=run.model.block.d_model,
        num_steps=run.train.num_steps,
    )

    def make(key):
        return Transformer(run.model, key)

    graph = parameters.graph(run.model)
    init = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(make(key))))
    params = jax.tree.map(jnp.float64, init(jax.random.key(run.train.seed)))
    compute = Compute(dtype=jnp.dtype(jnp.float64))
    state = dict(params=params, optimizer=optimizer.init(params), step=0, key=0)
    step = jax.jit(
        functools.partial(
            train_step, graph=graph, optimizer=optimizer, compute=compute, accumulation_steps=1
        )
    )
    rows = np.random.default_rng(0).integers(0, run.model.vocab_size, (B, T + 1), np.int32)
    figures = []
    for _ in range(STEPS):
        state, metrics = step(state, rows)
        figures.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return figures


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("mechanism", json.loads(GOLDEN.read_text()))
def test_golden_training_steps(x64, mechanism):
    expected = json.loads(GOLDEN.read_text())[mechanism]
    assert expected[-1][0] < expected[0][0] - 0.1  # it learns
    np.testing.assert_allclose(
        _figures(mechanism),
        expected,
        rtol=1e-6,  # the float32 parts leave 1e-7
        err_msg=f"{mechanism}: [loss, gradient norm] by step. If a change of the model, its "
        "initialisation or the optimizer is meant, run `python tests/training/test_golden_steps.py "
        "--write` and say in the commit why the numbers moved; a refactoring must not move them.",
    )


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or not CONFIGS.keys() >= set(sys.argv[2:]):
        sys.exit(f"usage: test_golden_steps.py --write [NAME ...], of {', '.join(CONFIGS)}")
    figures = json.loads(GOLDEN.read_text()) if sys.argv[2:] else {}
    with jax.enable_x64(True):
        figures |= {mechanism: _figures(mechanism) for mechanism in sys.argv[2:] or CONFIGS}
    lines = [
        f"{json.dumps(mechanism)}: {json.dumps(figures[mechanism])}"
        for mechanism in CONFIGS
        if mechanism in figures
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
