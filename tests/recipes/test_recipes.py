"""What recipes promise of rates, of what is tuned, and of rows that are in memory at once."""

import jax
import numpy as np
import pytest

from kvjax import optim
from kvjax import recipes
from kvjax.model import parameters
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.optim import OptimizerConfig

D = 12


@pytest.fixture
def model(make_mechanism):
    block = dict(num_layers=1, d_model=D, mlp_dim=20, norm="layer", norm_gain=True)
    return TransformerConfig(
        block=BlockConfig(**block), mechanisms=(make_mechanism("lrkv"),), vocab_size=10
    )


def test_adamw_has_one_rate_at_any_width(model):
    """A first step of Adam is as long as its rate, whatever the gradient."""
    shapes, axes = parameters.abstract(model)
    keys = recipes.adamw(1e-3, D, weight_decay=0.0, warmup_steps=0, clip_norm=0.0)
    optimizer = optim.make_optimizer(OptimizerConfig(**keys), axes, d_model=D, num_steps=100)
    ones = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    updates = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x)[0])(ones)
    lengths = {float(np.abs(leaf).max()) for leaf in jax.tree.leaves(updates)}
    assert max(lengths) == pytest.approx(1e-3, rel=1e-3)
    assert min(lengths) == pytest.approx(max(lengths), rel=1e-3)


@pytest.mark.parametrize(
    "tune, names",
    [
        ("qk", {"query", "base_key", "latent_key", "expand_key"}),
        (
            "qkv",
            {f"{part}_{of}" for part in ("base", "latent", "expand") for of in ("key", "value")},
        ),
        ("attention", {"out"}),
    ],
)
def test_what_is_tuned_is_of_attention_alone(model, tune, names):
    tuned = optim.tuned(
        OptimizerConfig(tuned=recipes.TUNED[tune]), parameters.abstract(model).shapes
    )
    paths = [
        ".".join(str(k.key if hasattr(k, "key") else k.idx) for k in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tuned)
    ]
    assert all(".attention." in path for path in paths), paths
    assert names <= {path.rpartition(".")[2] for path in paths}
    assert any(path.endswith(".out") for path in paths) == (tune == "attention")


@pytest.mark.parametrize("scale", ["128m", "2p5b", "6p3b"])
def test_a_part_of_mid_training_has_the_rows_of_one_of_pretraining(scale):
    attention = recipes.lrkv(6, rank=64)
    before = recipes.pretrain("a", scale=scale, attention=attention).train
    after = recipes.mid_train("mid/a", scale=scale, attention=attention).train
    rows = lambda train: train.batch_size // train.grad_accumulation
    assert rows(after) == rows(before)
