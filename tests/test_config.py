"""A config resolves, or its message names key and value."""

import jax.numpy as jnp
import ml_collections
import pytest

from kvjax import config as config_lib, recipes
from kvjax.config import ComputeConfig
from kvjax.foundation.errors import UserError

LRKV = recipes.lrkv(4, rank=16, head_dim=32)


def _config(attention=LRKV):
    config = recipes.pretrain("x", scale="tiny", attention=attention)
    return config.copy_and_resolve_references().unlock()


def _set(path, value, attention=LRKV):
    config = ml_collections.ConfigDict(_config(attention).to_dict(), type_safe=False)
    section, key = path.split(".")
    config[section][key] = value
    return config


def test_resolves():
    run = config_lib.resolve(_config())
    assert run.name == "x"
    assert run.tokens_per_step == 32 * 256
    assert run.model.block.num_layers == len(run.model.mechanisms) == 4
    assert run.model.vocab_size == run.data.vocab_size == 2048
    assert run.model.mechanisms[0].rank == 16


def test_rank_by_layer():
    run = config_lib.resolve(_set("attention.layer_ranks", (16, 8, 8, 0)))
    assert [m.rank for m in run.model.mechanisms] == [16, 8, 8, 0]
    assert [n for _, n in run.model.layer_groups] == [1, 2, 1]


BAD = [
    ("attention.kind", "linear", "'grouped', 'factored', 'mla', 'mla_lrkv'"),
    ("attention.num_heads", 3, "num_kv_heads = 4: must divide num_heads = 3"),
    ("attention.num_heads", "4", "config.attention.num_heads = '4' is a str"),
    ("attention.rank", 33, "rank = 33: must lie in [0, 32]"),
    ("attention.rank", 2.0, "config.attention.rank = 2.0 is a float"),
    ("attention.key_dim", 33, "33 rotated channels"),
    ("attention.num_bases", 3, "num_bases = 3: must divide num_kv_heads = 4"),
    ("attention.qk_norm", "l2", "qk_norm = 'l2': must be one of"),
    ("attention.rnak", 3, "config.attention.rnak: no such key"),
    ("attention.layer_ranks", (1, 2), "describes 2 layers and config.model.num_layers = 4"),
    ("attention.layer_ranks", (1, 2, 3, 99), "config.attention.layer_ranks[3] = 99"),
    ("attention.layer_ranks", (1, 2, 3, 1.5), "layer_ranks[3] = 1.5 is a float"),
    ("attention.layer_ranks", 8, "layer_ranks = 8 is a int"),
    ("model.num_layers", 0, "config.model.num_layers = 0"),
    ("model.num_layers", True, "config.model.num_layers = True is a bool"),
    ("model.norm", "batch", "config.model.norm = 'batch': must be one of 'rms', 'layer'"),
    ("model.causal", False, "config.model.causal = False"),
    ("model.rope_base", "1e4", "config.model.rope_base = '1e4' is a str"),
    ("model.rope_base", 0.0, "config.model.rope_base = 0.0"),
    ("model.norm_epsilon", -1e-6, "config.model.norm_epsilon = -1e-06"),
    ("optimizer.schedule", "exponential", "config.optimizer.schedule = 'exponential'"),
    ("optimizer.clip_norm", -1.0, "config.optimizer.clip_norm = -1.0"),
    ("train.num_steps", 0, "config.train.num_steps = 0: must be at least 1"),
    ("train.batch_size", 0, "config.train.batch_size = 0: must be at least 1"),
    (
        "train.grad_accumulation",
        5,
        "grad_accumulation = 5: must divide config.train.batch_size = 32",
    ),
    ("train.log_every", 0, "config.train.log_every = 0"),
    ("train.eval_every", -1, "config.train.eval_every = -1"),
    ("train.checkpoint_every", 0, "config.train.checkpoint_every = 0"),
    ("train.keep_checkpoints", 0, "config.train.keep_checkpoints = 0"),
    ("train.seed", -1, "config.train.seed = -1: must be at least 0"),
    ("train.seed", 1.0, "config.train.seed = 1.0 is a float"),
    ("train.stop_after", -1, "config.train.stop_after = -1"),
    ("train.sample_tokens", -1, "config.train.sample_tokens = -1"),
    ("train.bad_steps", "ignore", "config.train.bad_steps = 'ignore': must be one of 'stop', 'sk"),
    ("train.spike_factor", 1.0, "config.train.spike_factor = 1.0: must be 0"),
    ("train.spike_factor", -1.0, "config.train.spike_factor = -1.0: must be 0"),
    ("train.spike_factor", float("nan"), "config.train.spike_factor = nan: must be 0"),
    ("train.max_bad_steps", 0, "config.train.max_bad_steps = 0: must be at least 1"),
    ("compute.dtype", "float16", "config.compute.dtype = 'float16': must be one of"),
    (
        "compute.remat",
        "some",
        "config.compute.remat = 'some': must be one of 'none', 'dots', 'attention', 'full'",
    ),
    ("compute.unroll", "yes", "config.compute.unroll = 'yes'"),
    ("compute.query_chunk", -2, "config.compute.query_chunk = -2: must be at least -1"),
    ("compute.loss_chunks", 0, "config.compute.loss_chunks = 0: must be at least 1"),
    ("mesh.data", 0, "config.mesh.data = 0: must be at least 1"),
    ("mesh.fsdp", -1, "config.mesh.fsdp = -1: must be at least 0"),
    ("data.vocab_size", 10, "config.data.vocab_size = 10"),
    ("data.sequence_length", 2**20 + 1, "config.data.sequence_length = 1048577"),
    ("data.sequence_length", "256", "config.data.sequence_length = '256' is a str"),
]


@pytest.mark.parametrize("path, value, message", BAD)
def test_bad_values_name_the_key_and_the_value(path, value, message):
    with pytest.raises(UserError) as error:
        config_lib.resolve(_set(path, value))
    assert message in str(error.value)


def test_layer_ranks_need_a_rank():
    config = _set("attention.layer_ranks", (1, 2, 3, 4), recipes.mla(4, latent=48, head_dim=32))
    with pytest.raises(UserError, match="layer_ranks: 'mla' has no rank"):
        config_lib.resolve(config)


def test_sections():
    config = _config()
    del config["mesh"]
    config["mash"] = 1
    with pytest.raises(UserError, match=r"unknown \['mash'\], missing \['mesh'\]"):
        config_lib.resolve(config)


def test_missing_key_of_a_section():
    config = _config()
    del config.attention["num_heads"]
    with pytest.raises(UserError, match="config.attention: missing key.* num_heads"):
        config_lib.resolve(config)


def test_automatic_compute():
    for platform, layers, dtype, unroll, chunk in (
        ("cpu", 8, "float32", True, 64),
        ("cpu", 9, "float32", False, 64),
        ("gpu", 8, "bfloat16", False, 0),
        ("tpu", 36, "bfloat16", False, 0),
    ):
        compute = ComputeConfig().resolve(platform, layers)
        assert compute.dtype == jnp.dtype(dtype)
        assert (compute.unroll, compute.query_chunk) == (unroll, chunk)


def test_explicit_compute():
    options = dict(dtype="bfloat16", unroll="off", query_chunk=0, remat="dots", loss_chunks=3)
    compute = ComputeConfig(**options).resolve("cpu", 2)
    assert (compute.dtype, compute.unroll) == (jnp.dtype(jnp.bfloat16), False)
    assert (compute.query_chunk, compute.remat, compute.loss_chunks) == (0, "dots", 3)
    assert ComputeConfig(unroll="on").resolve("gpu", 50).unroll


def test_float64_needs_x64():
    with pytest.raises(UserError, match="dtype = 'float64': set JAX_ENABLE_X64=1"):
        ComputeConfig(dtype="float64").resolve("cpu", 2)


def test_names_are_folders_below_runs():
    config = _config()
    for name in ("x", "sweeps/a", "a..b/c.d"):
        config.name = name
        assert config_lib.resolve(config).name == name
    for name in ("..", "../x", "a/..", "a/../../b", ".x", "/x", " x", "x ", "", "x\n", "x" * 201):
        config.name = name
        with pytest.raises(UserError, match="config.name = .*must be "):
            config_lib.resolve(config)
