"""The benchmark's PyTorch model against kvjax: equal logits, equal training steps.

Skipped without PyTorch, which no other test needs. To run them:

    pip install torch && pytest tests/experiments/benchmarks/test_torch_training.py
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import contender, torch_training, train_benchmark  # noqa: E402
from kvjax.costs import formulas  # noqa: E402
from kvjax.distributed import sharding  # noqa: E402
from kvjax.model.loss import mean_loss  # noqa: E402
from kvjax.model.transformer import Transformer  # noqa: E402
from kvjax.training.program import Program  # noqa: E402

SMALL = (
    "model.num_layers=3 model.d_model=48 model.mlp_dim=160 attention.num_heads=4 "
    "attention.num_kv_heads=4 attention.num_bases=4 attention.key_dim=8 attention.value_dim=8 "
    "data.vocab_size=300 data.sequence_length=20"
)


@pytest.fixture
def run():
    """A run of three layers in float32 with distinct sizes."""
    ours = train_benchmark.our_run("configs/mha_tiny.py", SMALL, rows=4, steps=1)
    return train_benchmark.torch_run(ours.experiment, "default", "default", 1)


def training(run, *, dtype=torch.float32, parts=1):
    arguments = run.arguments
    return torch_training.Training(
        torch_training.Shape(**arguments["shape"]),
        torch_training.Recipe(**arguments["recipe"]),
        length=arguments["length"],
        dtype=dtype,
        device="cpu",
        parts=parts,
        compile_mode=None,
    )


def as_torch(weights: dict) -> dict:
    """Our parameter tree as the PyTorch model's state: [out, in] matrices, layer by layer."""
    (stack,) = weights["segments"].values()
    attention, mlp = stack["attention"], stack["mlp"]
    stacks = {
        "attention.query": attention["mechanism"]["query"],
        "attention.key": attention["mechanism"]["base_key"],
        "attention.value": attention["mechanism"]["base_value"],
        "up": mlp["up"],
        "down": mlp["down"],
    }
    layers = len(mlp["up"])
    matrices = {name: np.asarray(w).reshape(layers, w.shape[1], -1) for name, w in stacks.items()}
    out = np.asarray(attention["out"])  # [L, N, H, D]
    matrices["attention.out"] = out.reshape(layers, -1, out.shape[-1])
    state = {"embedding.weight": weights["embedding"], "head.weight": weights["head"].T}
    for name, stacked in matrices.items():
        state |= {f"blocks.{layer}.{name}.weight": w.T for layer, w in enumerate(stacked)}
    return {name: torch.tensor(np.array(value)) for name, value in state.items()}


def random_rows(run, seed=0):
    shape = (run.arguments["rows"], run.arguments["length"] + 1)
    vocabulary = run.experiment.model.vocab_size
    return np.random.default_rng(seed).integers(0, vocabulary, shape).astype(np.int32)


@pytest.mark.parametrize("config", ["mha_tiny", "mha_128m"])
def test_as_many_parameters(config):
    ours = train_benchmark.our_run(f"configs/{config}.py", "", rows=None, steps=1)
    given = train_benchmark.torch_run(ours.experiment, "default", "default", 1).arguments
    with torch.device("meta"):
        model = torch_training.Model(torch_training.Shape(**given["shape"]), 8, torch.float32)
    there = sum(p.numel() for p in model.parameters())
    assert there == formulas.parameters(ours.experiment.model)["total"] == given["parameters"]


def test_other_counts_are_refused(run):
    with pytest.raises(ValueError, match="parameters, kvjax's model has 7"):
        torch_training.training_speed(**run.arguments | dict(parameters=7))


def test_same_logits_and_loss(run, randomise):
    model, weights = randomise(
        lambda: Transformer(run.experiment.model, jax.random.key(0)), dtype=np.float32
    )
    theirs = training(run).model
    theirs.load_state_dict(as_torch(weights))
    rows = random_rows(run)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    logits = model.logits(model(jnp.asarray(tokens)))
    with torch.no_grad():
        there = theirs.logits(torch.tensor(tokens).long())
        loss = theirs(torch.tensor(tokens).long(), torch.tensor(targets).long())
    assert np.abs(logits).max() > 1  # neither is zero
    np.testing.assert_allclose(there.numpy(), logits, rtol=0, atol=1e-5)
    expected = mean_loss(model, jnp.asarray(tokens), jnp.asarray(targets))
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_same_training_steps(run, randomise, parts):
    """Gradients, clipping, Muon and AdamW: weights stay equal for several steps."""
    experiment = run.experiment
    _, weights = randomise(
        lambda: Transformer(experiment.model, jax.random.key(0)), dtype=np.float32
    )
    compute = experiment.compute.resolve("cpu", experiment.model.block.num_layers)
    mesh = sharding.make_mesh(experiment.mesh, jax.devices()[:1])
    program = Program(experiment, compute, mesh)
    theirs = training(run, parts=parts)
    theirs.model.load_state_dict(as_torch(weights))
    state = program.init(jax.random.key(0)) | dict(params=jax.tree.map(jnp.asarray, weights))
    for seed in range(3):
        rows = random_rows(run, seed)
        state, metrics = program.train_step(state, rows)
        loss = theirs.step(torch.tensor(rows).long())
        assert loss.item() == pytest.approx(metrics["loss"].item(), abs=2e-5)
    before, after = as_torch(weights), as_torch(jax.device_get(state["params"]))
    for name, there in theirs.model.state_dict().items():
        moved = (after[name] - before[name]).norm()
        assert moved > 0, name
        assert (there - after[name]).norm() < 1e-3 * moved, name


def test_muon_is_pytorchs(run):
    """Compares in bfloat16 with constant momentum, as `torch.optim.Muon` has."""
    recipe = run.arguments["recipe"] | dict(momentum_start=0.9, momentum_end=0.9)
    recipe = torch_training.Recipe(**recipe)
    generator = torch.Generator().manual_seed(0)

    def draw():
        return [
            torch.randn(shape, generator=generator)
            for shape in [(48, 160), (160, 48), (160, 48), (48, 48)]
        ]

    start = draw()
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    muon = torch_training.Muon(ours, recipe, torch.bfloat16, compiled=False)
    options = dict(lr=recipe.matrix_learning_rate, weight_decay=0.0, momentum=0.9)
    library = torch.optim.Muon(theirs, **options)
    for _ in range(3):
        for a, b, gradient in zip(ours, theirs, draw(), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        muon.step()
        library.step()
    for a, b, value in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 1e-5 * (b - value).norm()


@pytest.mark.slow
def test_compiled_in_its_own_process(run):
    """Compiles with `torch.compile`; the process does not import JAX."""
    result = contender.run("experiments.benchmarks.torch_training", run.arguments | dict(steps=3))
    assert len(result["seconds"]) == 3 and min(result["seconds"]) > 0
    assert result["parameters"] == run.arguments["parameters"]
    assert result["loss"] < np.log(
        run.experiment.model.vocab_size
    )  # after training on the same rows
    code = "import experiments.benchmarks.torch_training, json, sys\n"
    code += "print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "jax" not in json.loads(printed.stdout)
