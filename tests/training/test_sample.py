"""The sample at the end of a run: the same each time, and as long as positions allow."""

import shutil
import types

from etils import epath
from flax import nnx
import jax
import pytest

from kvjax import experiment as experiment_lib
from kvjax.data import tokenizer
from kvjax.model import parameters
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.training import ending
from kvjax.training import loop
from tests import runs

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.slow
def test_documents_of_a_sample_are_told_apart_without_special_tokens(whole, tmp_path, monkeypatch):
    two = types.SimpleNamespace(texts=["is dead.<|bos|>Enter"])
    monkeypatch.setattr(ending, "generate", lambda *_, **__: two)
    shutil.copytree(whole.workdir, tmp_path, dirs_exist_ok=True)
    loop.train(whole.config, epath.Path(tmp_path))
    assert (tmp_path / "sample.txt").read_text() == "The king is dead.\n\nEnter\n"


@pytest.mark.slow
def test_a_sample_of_several_hosts_has_the_gains_of_training(source, tmp_path, monkeypatch):
    """They read its weights anew: those of norms outside the blocks are used in float32."""
    asked, sample = [], ending._sample

    def as_one_of_two(given, graph, params):
        with monkeypatch.context() as patched:
            patched.setattr(ending.distributed, "count", lambda: 2)
            read = lambda *args: asked.append(args[2]) or params
            patched.setattr(ending, "read_parameters", read)
            return sample(given, graph, params)

    monkeypatch.setattr(ending, "_sample", as_one_of_two)
    config = runs.small_config(*source, num_steps=1, sample_tokens=4)
    config.model.norm_gain, config.compute.dtype = True, "bfloat16"
    loop.train(config, epath.Path(tmp_path))
    (params,) = asked
    assert params["final_norm"]["gain"].dtype == "float32"
    assert params["embedding"].dtype == "bfloat16"


@pytest.mark.slow
def test_the_sample_is_the_same_each_time(whole, tmp_path):
    shutil.copytree(whole.workdir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sample.txt").unlink()
    loop.train(whole.config, epath.Path(tmp_path))
    texts = [(folder / "sample.txt").read_text() for folder in (whole.workdir, tmp_path)]
    assert texts[0] == texts[1] and texts[0].startswith("The king ")


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["The king ", "The king " * 9])
def test_a_sample_ends_where_positions_do(source, prompt):
    config = runs.small_config(*source, sample_tokens=60, sample_prompt=prompt)
    config.model.update(positions="learned", max_positions=32)
    experiment = experiment_lib.resolve(config)
    make = lambda: Transformer(experiment.model, jax.random.key(0))
    graph = parameters.graph(experiment.model)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
    given = types.SimpleNamespace(
        experiment=experiment,
        compute=Compute(),
        dataset=types.SimpleNamespace(tokenizer=tokenizer.byte_tokenizer()),
    )
    sample = ending._sample(given, graph, params)
    assert sample.startswith(prompt)
    # BOS and the prompt's bytes have positions, and so have all tokens but the last.
    assert len(sample) > len(prompt) if len(prompt) < 32 else sample == prompt
