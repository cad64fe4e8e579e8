"""What the model's config refuses, and how it groups layers."""

import dataclasses

import pytest

from kvjax.attention.diagonal import DiagonalConfig
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig

SHAPE = dict(num_layers=3, d_model=16, mlp_dim=32)


def _config(mechanism, **block):
    return TransformerConfig(
        block=BlockConfig(**SHAPE | block), mechanisms=(mechanism,) * 3, vocab_size=32
    )


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("num_layers", 0, "at least 1"),
        ("d_model", -1, "at least 1"),
        ("mlp_dim", 0, "at least 1"),
        ("max_positions", 0, "at least 1"),
        ("logit_softcap", -1.0, "must be 0 (none), or at least 0.01"),
        ("norm", "batch", "'rms', 'layer'"),
        ("positions", "alibi", "'rope', 'learned', 'sinusoidal', 'none'"),
        ("dropout", 1.0, "0.99"),
        ("activation", "tanh", "'relu2', 'relu', 'gelu', 'gelu_exact', 'swiglu'"),
        ("rope_factor", 0.5, "at least 1"),
        ("rope_fraction", 0.0, "at least"),
        ("rope_fraction", 1.5, "1"),
        ("rope_original", 0, "at least 1"),
        ("rope_high", 0.5, "must be more than config.model.rope_low = 1.0"),
        ("window", -1, "at least 0"),
    ],
)
def test_bad_values(key, value, allowed):
    with pytest.raises(UserError) as error:
        BlockConfig(**SHAPE | {key: value})
    assert f"config.model.{key} = {value!r}" in str(error.value)
    assert allowed in str(error.value)


def test_alibi_is_the_only_word_on_positions(make_mechanism):
    mechanism = make_mechanism("lrkv", alibi=True)
    of = lambda positions: TransformerConfig(
        block=BlockConfig(**SHAPE | dict(num_layers=1, positions=positions)),
        mechanisms=(mechanism,),
        vocab_size=8,
    )
    assert of("none").mechanisms == (mechanism,)
    with pytest.raises(UserError, match="alibi = True: needs config.model.positions = 'none', not"):
        of("rope")


def test_a_mean_over_the_row_is_of_models_that_see_it(make_mechanism):
    mechanism = DiagonalConfig(**dataclasses.asdict(make_mechanism("qkv_tied")))
    assert _config(mechanism, causal=False).mechanisms[0].needs_whole_rows
    with pytest.raises(UserError, match="must be False where attention dep.* that of layer 0"):
        _config(mechanism)


def test_a_window_is_of_causal_models():
    with pytest.raises(UserError, match="window = 4: is of causal models; set it to 0"):
        BlockConfig(**SHAPE, window=4, causal=False)


def test_odd_rope_dim(make_mechanism):
    for mechanism, odd in (
        (make_mechanism("mha", key_dim=7), 7),
        (make_mechanism("mla", rope_key_dim=5), 5),
        (make_mechanism("mla_paper", key_dim=9), 9),
    ):
        with pytest.raises(UserError, match=f"config.attention: {odd} channels.*even"):
            _config(mechanism)
        _config(mechanism, positions="none")  # nothing is rotated
    _config(make_mechanism("mla", key_dim=7))  # only the RoPE key is rotated
    _config(make_mechanism("mha", value_dim=7))


@pytest.mark.parametrize(
    "name, keys, key",
    [("mla", dict(latent_dim=17), "latent_dim"), ("gqa", dict(query_rank=17), "query_rank")],
)
def test_latents_are_no_wider_than_what_they_are_made_of(make_mechanism, name, keys, key):
    with pytest.raises(UserError, match=f"attention.{key} = 17: must be at most .*d_model = 16"):
        _config(make_mechanism(name, **keys))
    _config(make_mechanism(name, **{key: 16}))


def test_alibi_needs_a_causal_model(make_mechanism):
    with pytest.raises(UserError, match="alibi = True: needs config.model.causal = True"):
        _config(make_mechanism("mha", alibi=True), positions="none", causal=False)


def test_a_part_of_no_rotated_channels_is_none():
    """Shared KV and GTA may rotate none, whatever part of them would turn."""
    assert rope.frequencies(0, rope.Partial(100.0, 0.5)).shape == (0,)
    assert rope.frequencies(8, rope.Partial(100.0, 0.01)).astype(bool).sum() == 1


def test_mechanisms_and_layers_agree(make_mechanism):
    with pytest.raises(UserError, match="layer_ranks describes 2 layers.*num_layers = 3"):
        TransformerConfig(
            block=BlockConfig(**SHAPE), mechanisms=(make_mechanism("mha"),) * 2, vocab_size=32
        )


def test_segments_are_runs_of_equal_mechanisms(make_mechanism):
    a, b = make_mechanism("lrkv"), make_mechanism("lrkv", rank=5)
    equal = dataclasses.replace(a)
    config = dataclasses.replace(_config(a), mechanisms=(a, equal, b))
    assert config.segments == ((a, 2), (b, 1))
    assert dataclasses.replace(config, mechanisms=(a, b, a)).segments == ((a, 1), (b, 1), (a, 1))


def test_length(make_mechanism):
    mha = make_mechanism("mha")
    _config(mha).check_length(2**20)
    with pytest.raises(UserError, match="sequence_length = 1048577: rope.* 1048576 tokens"):
        _config(mha).check_length(2**20 + 1)
    learned = _config(mha, positions="learned", max_positions=100)
    learned.check_length(100)
    with pytest.raises(UserError, match="sequence_length = 101: learned.* 100 tokens"):
        learned.check_length(101)
    _config(mha, positions="none").check_length(2**30)


def test_angles_end_where_they_are_used(make_mechanism):
    plain, plus = make_mechanism("mha"), make_mechanism("qk_tied_plus")
    assert _config(plain).angle_limit == _config(plus, positions="none").angle_limit == 2**20
    for positions in ("none", "learned"):
        assert _config(plain, positions=positions).angle_limit is None
