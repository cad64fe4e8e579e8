"""Every file in configs/ resolves to what its golden text and its docstring say.

    python tests/test_configs.py --write

writes the golden texts anew. That is right when a config or a default was changed on purpose: read
the diff before committing it.
"""

import importlib.util
import pathlib
import re
import sys

import jax.numpy as jnp
import ml_collections
import pytest

from kvjax import configuration
from kvjax import costs
from kvjax import experiment

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens" / "configs"
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
MECHANISMS = ("mha", "gqa", "mqa", "lrkv", "mla")
SCALES = ("tiny", "128m", "2p5b", "6p3b")


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mechanism_at_every_scale():
    assert {f"{m}_{s}" for m in MECHANISMS for s in SCALES} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_resolves_and_is_locked(name):
    config = _load(name).get_config()
    assert config.name == name
    assert experiment.resolve(config).name == name
    assert config.is_locked
    with pytest.raises(KeyError):
        config["nmae"] = "typo"
    for key, section in config.items():
        if isinstance(section, ml_collections.ConfigDict):
            assert section.is_locked, key


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_declared(name):
    """A key left to a dataclass's default could not be set on the command line."""
    config, run = _load(name).get_config(), experiment.resolve(_load(name).get_config())
    parts = dict(model=run.model.block, optimizer=run.optimizer, data=run.data, train=run.train)
    parts |= dict(compute=run.compute, mesh=run.mesh)
    for section, resolved in parts.items():
        assert set(config[section]) == set(vars(resolved)), section
    assert set(config.attention) - {"kind", "layer_ranks"} == set(vars(run.model.mechanisms[0]))


@pytest.mark.parametrize("name", NAMES)
def test_golden_text(name):
    path = GOLDENS / f"{name}.txt"
    text = configuration.to_text(_load(name).get_config())
    assert path.exists(), f"no golden text: run `python tests/test_configs.py --write`, add {path}"
    assert text == path.read_text(), (
        f"configs/{name}.py no longer resolves to {path.relative_to(ROOT)}. If the change is meant "
        "(it changes what the config trains, and every figure measured with it), run `python "
        "tests/test_configs.py --write` and commit the difference; if not, undo it."
    )


def test_no_golden_text_without_a_config():
    assert sorted(path.stem for path in GOLDENS.glob("*.txt")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name):
    module = _load(name)
    doc, run = module.__doc__, experiment.resolve(module.get_config())
    assert f"    python -m kvjax.main --config=configs/{name}.py\n" in doc
    counts = costs.parameters(run.model)
    pattern = r"([\d,]+) parameters, ([\d,]+) without the input embedding; ([\d,]+) cache\s+bytes"
    total, without, cache = (int(n.replace(",", "")) for n in re.search(pattern, doc).groups())
    assert total == counts["total"]
    assert without == counts["total"] - counts["embedding"]
    assert cache == costs.cache_bytes_per_token(run.model, jnp.dtype(jnp.bfloat16))
    flops = costs.training_flops_per_token(run.model, run.data.sequence_length)
    assert float(re.search(r"([\d.]+) GFLOP\s+per\s+trained", doc).group(1)) == round(
        flops / 1e9, 3
    )
    block = run.model.block
    shape = r"(\d+) layers,\s+width (\d+),\s+(\d+) heads of (\d+)"
    first = run.model.mechanisms[0]
    assert tuple(map(int, re.search(shape, doc).groups())) == (
        block.num_layers,
        block.d_model,
        first.num_heads,
        first.value_dim,
    )
    tokens = run.train.num_steps * run.tokens_per_step
    if budget := re.search(r"Budget: (\d+)B tokens in steps of ([\d,]+): ([\d,]+) exaFLOPs", doc):
        billions, step, exaflops = (int(n.replace(",", "")) for n in budget.groups())
        assert round(tokens / 1e9) == billions
        assert run.tokens_per_step == step
        assert round(tokens * flops / 1e18) == exaflops
    else:
        assert f"{tokens / 1e6:.1f}M tokens" in doc


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_configs.py --write")
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for stale in GOLDENS.glob("*.txt"):
        stale.unlink()
    for name in NAMES:
        (GOLDENS / f"{name}.txt").write_text(configuration.to_text(_load(name).get_config()))
