"""The document mask, config.train.separate."""

import json
import pathlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.transformer import Compute, Transformer
from kvjax.training import loop, program
from tests import runs
from tests.distributed import small_step
from tests.distributed.small_step import Step
from tests.mechanisms import MECHANISMS
from tests.runs import records

BOS = 0
F64 = jnp.dtype(jnp.float64)
LENGTHS = (3, 1, 4)  # of the documents in a row


def _row(seed):
    """[T + 1] tokens: the end of a document, documents of LENGTHS with their BOS, and a target."""
    rng = np.random.default_rng(seed)

    def document(length):
        return [BOS, *rng.integers(1, small_step.V, length - 1)]

    end = [*rng.integers(1, small_step.V, 2)]
    return np.array([*end, *(t for n in LENGTHS for t in document(n)), 5], np.int32)


# The "+" of projection sharing has a bias for each position in a row.
_RELATIVE = [name for name in MECHANISMS if not name.endswith("_plus")]


@pytest.mark.slow
@pytest.mark.parametrize("name", _RELATIVE)
def test_a_document_is_computed_as_if_it_were_alone(x64, make_mechanism, randomise, name):
    """RoPE depends on distances only, so positions within a row do not matter."""
    model, _ = randomise(
        lambda: Transformer(small_step.model(make_mechanism(name)), jax.random.key(0))
    )
    row = jnp.asarray(_row(0))[None]
    forward = jax.jit(
        lambda tokens, segments: model(tokens, segment_ids_BS=segments, compute=Compute(dtype=F64))
    )
    segments = program.segment_ids(row, BOS)
    assert segments.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 3, 3]]
    together = forward(row[:, :-1], segments)
    assert np.abs(together - forward(row[:, :-1], None)).max() > 1e-3
    for document in range(4):
        indices = np.flatnonzero(segments[0] == document)
        alone = forward(row[:, indices], None)
        np.testing.assert_allclose(together[:, indices], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "mesh_name",
    [name for name in small_step.MESHES if name != "one"],
)
def test_any_mesh_takes_the_same_step(x64, make_mechanism, randomise, mesh_name, masked):
    """Meshes, microbatches and masks change no loss under a document mask."""
    parts = 1 if mesh_name in ("fsdp8", "data2_fsdp4") else 2  # of 8 rows
    config = small_step.model(make_mechanism("lrkv"))
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    rows = small_step.rows(2)
    rows[:, :, [0, 3]] = BOS
    if masked:  # a conversation's BOS is no target
        rows[:, :, [0, 3, 5]] = ~rows[:, :, [0, 3, 5]]

    def train(mesh_name, **options):
        mesh = small_step.mesh(mesh_name)
        step = Step(config, params, mesh, jnp.float64, masked=masked, **options)
        return [step(batch) for batch in rows]

    figures, expected = train(mesh_name, begins=BOS, parts=parts), train("one", begins=BOS)
    np.testing.assert_allclose(figures, expected, rtol=1e-9)
    graph = parameters.graph(config)
    compute = dict(graph=graph, compute=Compute(dtype=F64), masked=masked)

    def evaluate(begins):
        return program.eval_step(
            params, rows[0], jnp.ones(small_step.V, jnp.int32), bos_id=begins, **compute
        )

    (nats, _, count, *_), (unmasked_nats, *_) = evaluate(BOS), evaluate(None)
    np.testing.assert_allclose(nats / count, figures[0][0], rtol=1e-9)
    assert abs(nats / unmasked_nats - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_documents_begin_with_the_tokenizers_bos(tmp_path):
    """A document mask changes the loss, and the identity of a run."""
    lines = pathlib.Path(runs.write_text(tmp_path / "text.txt")).read_text().splitlines()
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(dict(text=line[:20])) + "\n" for line in lines))
    source, bpb = (str(file), str(tmp_path / "data")), {}
    for separate in (False, True):
        config = runs.small_config(*source, num_steps=2, eval_every=2, separate=separate)
        workdir = epath.Path(tmp_path / str(separate))
        loop.train(config, workdir)
        bpb[separate] = records(workdir)[-1]["validation_bpb"]
        with pytest.raises(UserError, match="separate"):
            config.train.separate = not separate
            loop.train(config, workdir)
    assert bpb[True] != bpb[False]


def test_cudnn_has_no_document_mask(source):
    config = runs.small_config(*source, separate=True)
    config.compute.attention = "cudnn"
    with pytest.raises(UserError, match=r"attention = 'cudnn'.*train\.separate.*'auto' or 'xla'"):
        config_lib.resolve(config)


def test_gpus_have_no_kernel_with_a_document_mask_window_or_soft_cap(source):
    """Estimates of memory and time then assume XLA's attention."""
    kernels = {}
    for separate in (False, True):
        config = runs.small_config(*source, separate=separate)
        experiment = config_lib.resolve(config)
        kernels[separate] = [experiment.uses_attention_kernel(p) for p in ("cpu", "gpu", "tpu")]
    assert kernels == {False: [False, True, True], True: [False, False, True]}
    config.compute.attention = "xla"
    assert not config_lib.resolve(config).uses_attention_kernel("tpu")
    for key, value in (("window", 8), ("attention_softcap", 30.0)):
        config = runs.small_config(*source)
        config.model[key] = value
        experiment = config_lib.resolve(config)
        assert [experiment.uses_attention_kernel(p) for p in ("gpu", "tpu")] == [False, True]
