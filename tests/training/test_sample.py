"""The end of a run: curves, last figures, and a sample as long as positions allow."""

import dataclasses
import types

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention import named
from kvjax.config import TrainConfig
from kvjax.data import tokenizer
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.model.transformer import Compute
from kvjax.training import ending
from kvjax.workdir import metrics


class _Model(nnx.Module):
    def __init__(self):
        self.embedding = nnx.Param(jnp.arange(3.0))
        self.final_norm = nnx.Dict(gain=nnx.Param(jnp.arange(2.0)))


@dataclasses.dataclass(frozen=True)
class _Shape:
    mechanisms: tuple = (named.mqa(2),)


def _end(tmp_path, monkeypatch, capsys, *, limit=None, refused=False, diverged=False, **train):
    """Ends a run of a toy model; returns the calls, `sample.txt` if it exists, and the output."""
    calls = types.SimpleNamespace(options=None, read=None, drawn=None)
    dtype = jnp.dtype(jnp.bfloat16)
    folder = epath.Path(tmp_path)

    def generate(generator, tokens, prompts, **options):
        model, compute = generator
        assert model.embedding[...].tolist() == [0, 1, 2] and compute.dtype == dtype
        assert tokens.decode([65]) == "A" and prompts == [train["sample_prompt"]]
        calls.options = options
        if diverged:
            raise UserError("the logits are NaN")
        return types.SimpleNamespace(texts=["is dead.<|bos|>Enter"])

    def read(*arguments):
        calls.read = arguments
        return params

    def draw(workdir, **options):
        calls.drawn = workdir, options
        if refused:
            raise RuntimeError("503: slow down\nmore")  # as clients of buckets do

    monkeypatch.setattr(ending, "generate", generate)
    monkeypatch.setattr(ending, "Generator", lambda *arguments: arguments)
    monkeypatch.setattr(ending, "read_parameters", read)
    monkeypatch.setattr(ending, "max_positions", lambda model: {_Shape(): limit}[model])
    monkeypatch.setattr(metrics, "draw_curves", draw)
    monkeypatch.setattr(runtime, "seconds_since_launch", lambda: 61.7)
    graph, state = nnx.split(_Model())
    params = nnx.to_pure_dict(state)
    config = TrainConfig(num_steps=7, batch_size=1, seed=5, **train)
    run = types.SimpleNamespace(
        experiment=types.SimpleNamespace(name="a run", model=_Shape(), train=config),
        compute=Compute(dtype=dtype),
        mesh=sharding.make_mesh(sharding.MeshConfig(), jax.devices()[2:4]),
        workdir=folder,
        dataset=types.SimpleNamespace(
            info=dict(xz_bits_per_byte=2.5), tokenizer=tokenizer.byte_tokenizer()
        ),
    )
    evaluations = [dict(step=3), dict(step=7, tokens=12_345, validation_bpb=1.23456)]
    last = ending.write(run, graph, params, epath.Path("elsewhere"), evaluations)
    assert last == evaluations[-1]
    options = dict(title="a run", yardstick=2.5, mechanism="mqa", folder=epath.Path("elsewhere"))
    assert calls.drawn == (folder, options)
    sample = folder / "sample.txt"
    return calls, sample.read_text() if sample.exists() else None, capsys.readouterr()


def test_a_run_ends_with_curves_a_sample_and_a_line_of_figures(tmp_path, monkeypatch, capsys):
    """A blank line separates documents of a sample."""

    def end(**keys):
        return _end(tmp_path, monkeypatch, capsys, **keys)

    figures = (
        "validation: 1.2346 bits per byte after 12,345 tokens (xz -9e on the same text: 2.5000); "
        f"62 s in this process\ncurves, metrics, sample and checkpoints: {tmp_path}\n"
        f"with `pip install tensorboard`: tensorboard --logdir {tmp_path}\n"
    )
    calls, sample, output = end(sample_prompt="The king ", sample_tokens=0, refused=True)
    warning = f"WARNING: {tmp_path / 'curves.png'} was not written: 503: slow down\n"
    assert (calls.options, sample, *output) == (None, None, figures, warning)
    text = "The king is dead.\n\nEnter\n"
    # BOS and the prompt's nine bytes have positions, and so have all tokens but the last.
    for limit, prompt, num_tokens in (
        (None, "The king ", 60),
        (32, "The king ", 23),
        (90, "The king ", 60),
        (10, "The king ", 1),
        (9, "The king ", None),
        (9, "The king's son ", None),
    ):
        calls, sample, output = end(sample_prompt=prompt, sample_tokens=60, limit=limit)
        options = num_tokens and dict(num_tokens=num_tokens, seed=5, end_at_special=False)
        expected = text if num_tokens else f"{prompt}\n"
        assert (calls.options, sample) == (options, expected) and calls.read is None
        assert output.out == f"\n--- sample ---\n{expected}--------------\n\n{figures}"
    (tmp_path / "sample.txt").unlink()
    _, sample, output = end(sample_prompt="The king ", sample_tokens=1, diverged=True)
    assert (sample, *output) == (None, figures, "WARNING: no sample: the logits are NaN\n")
    # With several processes none holds all weights: they are read again, onto one device.
    monkeypatch.setattr(ending.distributed, "count", lambda: 2)
    calls, sample, _ = end(sample_prompt="The king ", sample_tokens=1)
    checkpoints, step, abstract = calls.read
    assert sample == text and (checkpoints, step) == (tmp_path / "checkpoints", 7)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[2])

    def shaped(size, dtype):
        return jax.ShapeDtypeStruct((size,), dtype, sharding=one)

    gain = dict(gain=shaped(2, jnp.float32))  # of norms outside the blocks, as it was trained
    assert abstract == dict(embedding=shaped(3, jnp.bfloat16), final_norm=gain)
