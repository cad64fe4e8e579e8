"""The model's config: bad values, layer groups, limits of positions."""

import dataclasses
import math

import pytest

from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.layer_kinds import LayerKind
from kvjax.model.transformer import Compute

SHAPE = dict(num_layers=3, d_model=16, mlp_dim=32)


def _config(mechanism, **block):
    return TransformerConfig(
        block=BlockConfig(**SHAPE | block), mechanisms=(mechanism,) * 3, vocab_size=32
    )


# By key: minimum and maximum.
BOUNDS = dict(
    num_layers=(1, 10_000),
    d_model=(1, 1_048_576),
    mlp_dim=(1, 4_194_304),
    max_positions=(1, 16_777_216),
    rope_original=(1, 16_777_216),
    logit_softcap=(0.01, 1e6),
    attention_softcap=(0.01, 1e6),
    logit_divisor=(1e-6, 1e6),
    embedding_scale=(1e-6, 1e6),
    residual_scale=(1e-6, 1e6),
    dropout=(0.0, 0.99),
    embedding_std=(0.0, 10.0),
    matrix_std=(0.0, 10.0),
    norm_epsilon=(0.0, 1.0),
    rope_base=(1.0, 1e38),
    rope_factor=(1.0, 1e6),
    rope_low=(0.0, 1e6),
    rope_high=(0.0, 1e6),
    rope_fraction=(1e-6, 1.0),
    rope_attention_factor=(1e-3, 1e3),
    window=(0, 1_048_576),
)
NAMES = dict(
    norm=("rms", "layer"),
    positions=("rope", "learned", "sinusoidal", "none"),
    rope_scaling=("llama3", "yarn", "linear"),
    activation=("relu2", "relu", "gelu", "gelu_exact", "swiglu", "geglu"),
)


def _message(**keys) -> str:
    """Returns the error message of a block's config; "" if it is valid."""
    try:
        BlockConfig(**SHAPE | keys)
    except UserError as error:
        return str(error)
    return ""


def test_bounds_of_a_block():
    for key, (least, most) in BOUNDS.items():
        shown = [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (least, most)]
        none = "0 (none), or " if key.endswith("softcap") else ""
        expected = f"must be {none}at least {shown[0]} and at most {shown[1]}"
        for value in (least, most):  # the least of rope_high is not more than rope_low
            assert not _message(**{key: value}).endswith(expected)
        whole = isinstance(least, int)
        for value in (least - 1, most + 1) if whole else (least - 1e-9, most * 1.0001, math.nan):
            assert _message(**{key: value}) == f"config.model.{key} = {value}: {expected}"
    for key, names in NAMES.items():
        assert not any(_message(**{key: name}) for name in names)
        known = ", ".join(map(repr, names))
        assert _message(**{key: "batch"}) == f"config.model.{key} = 'batch': must be one of {known}"
    assert not _message(logit_softcap=0.0) and not _message(window=4) and not _message(causal=False)
    assert "rope_high = 1.0: must be more than config.model.rope_low = 1.0" in _message(
        rope_high=1.0
    )
    assert "norm_outputs = True: must be False if" in _message(norm_outputs=True, norm_after=True)
    for other in ("norm_after", "norm_outputs"):
        assert f"norm_both = True: must be False if config.model.{other} is True" in _message(
            norm_both=True, **{other: True}
        )
    expected = _message(window=4, causal=False)
    assert "window = 4: needs config.model.causal = True; or set it to 0" in expected


@pytest.mark.parametrize(
    "keys, said",
    [
        (dict(rope_layers=(1, 0)), "rope_layers = (1, 0): must have a 0 or a 1 for each of"),
        (dict(rope_layers=(1, 0, 2)), "rope_layers = (1, 0, 2): must have a 0 or a 1"),
        (dict(rope_layers=(1, 0, 1), positions="none"), "needs config.model.positions = 'rope'"),
        (dict(window_layers=(1, 0, 1)), "window_layers = (1, 0, 1): needs config.model.window > 0"),
        (dict(window_layers=(1,), window=3), "for each of config.model.num_layers = 3 layers"),
        (dict(window_rope_base=9.0), "window_rope_base = 9.0: needs config.model.window > 0"),
        (dict(window_rope_base=0.5, window=3), "must be 0 (as in other layers), or at least 1"),
        (dict(window_rope_base=9.0, window=3, positions="none"), "needs config.model.positions ="),
        (
            dict(rope_scaling="yarn", rope_base=1.0),
            "rope_base = 1.0: must be more than 1 with YaRN",
        ),
    ],
)
def test_keys_that_choose_layers(keys, said):
    assert said in _message(**keys)


def test_a_block_is_nanochats_by_default():
    nanochat = dict(norm="rms", norm_gain=False, norm_bias=False, norm_epsilon=1e-6)
    nanochat |= dict(norm_after=False, embedding_norm=True, positions="rope", rope_base=10_000.0)
    nanochat |= dict(window=0, activation="relu2", dropout=0.0, bias=False, tied_head=False)
    nanochat |= dict(logit_softcap=15.0, causal=True, embedding_std=1.0, matrix_std=0.0)
    llama3 = dict(rope_factor=1.0, rope_low=1.0, rope_high=4.0, rope_original=8192)
    nanochat |= dict(norm_outputs=False, embedding_scale=1.0, residual_scale=1.0, logit_divisor=1.0)
    others = dict(zero_outputs=True, rope_fraction=1.0, max_positions=2048)
    defaults = dataclasses.asdict(BlockConfig(**SHAPE)).items()
    assert (SHAPE | nanochat | llama3 | others).items() <= defaults


def test_configs_are_frozen_and_take_keywords_only():
    for cls in (BlockConfig, TransformerConfig, Compute):
        parameters = cls.__dataclass_params__
        assert parameters.frozen and parameters.kw_only, cls


def test_base_of_angles():
    def angles_base(**keys):
        return BlockConfig(**SHAPE, rope_base=50.0, **keys).angles_base

    scaled = dict(rope_factor=8.0, rope_low=2.0, rope_high=3.0, rope_original=24)
    llama3 = rope.Llama3(base=50.0, factor=8.0, low=2.0, high=3.0, original=24)
    assert angles_base() == 50.0 and angles_base(positions="learned") is None
    assert angles_base(**scaled) == llama3
    assert angles_base(rope_fraction=0.5) == rope.Partial(base=50.0, fraction=0.5)
    assert angles_base(**scaled, rope_fraction=0.5) == rope.Partial(base=llama3, fraction=0.5)


def test_kinds_of_layers():
    yarn = rope.Yarn(base=50.0, factor=8.0, low=1.0, high=4.0, original=8192)
    keys = dict(rope_base=50.0, rope_factor=8.0, rope_scaling="yarn", rope_attention_factor=3.0)
    keys |= dict(window=5, window_layers=(1, 0, 1), rope_layers=(1, 1, 0))
    same, other = BlockConfig(**SHAPE, **keys), BlockConfig(**SHAPE, **keys, window_rope_base=7.0)
    last = LayerKind(None, 5)
    assert same.layer_kinds == (LayerKind(yarn, 5, 9.0), LayerKind(yarn, 0, 9.0), last)
    assert other.layer_kinds == (LayerKind(7.0, 5), LayerKind(yarn, 0, 9.0), last)
    linear = BlockConfig(**SHAPE, rope_base=50.0, rope_factor=8.0, rope_scaling="linear")
    assert set(linear.layer_kinds) == {LayerKind(rope.Linear(50.0, 8.0))}


@pytest.mark.parametrize("key, value", [("attention_softcap", 5.0), ("rope_attention_factor", 2.0)])
def test_biases_by_position_forbid_changed_logits(make_mechanism, key, value):
    """In training they are part of the logits that are capped and scaled; in decoding not."""
    for biased, positions in ((dict(alibi=True), "none"), (dict(position_channels=8), "rope")):
        mechanism = make_mechanism("mha", **biased)
        block = BlockConfig(num_layers=1, d_model=64, mlp_dim=8, positions=positions)
        TransformerConfig(block=block, mechanisms=(mechanism,), vocab_size=8)
        block = dataclasses.replace(block, **{key: value})
        with pytest.raises(UserError, match=f"config.model.{key} = {value}: must be .* with "):
            TransformerConfig(block=block, mechanisms=(mechanism,), vocab_size=8)


def test_alibi_needs_causal_models_without_other_positions(make_mechanism):
    mechanisms = (make_mechanism("mha"), make_mechanism("lrkv", alibi=True), make_mechanism("mha"))

    def mechanisms_of(**keys):
        return dataclasses.replace(_config(mechanisms[0], **keys), mechanisms=mechanisms).mechanisms

    assert mechanisms_of(positions="none") == mechanisms
    with pytest.raises(UserError, match="alibi = True: needs config.model.positions = 'none', not"):
        mechanisms_of(positions="learned")
    with pytest.raises(UserError, match="alibi = True: needs config.model.causal = True"):
        mechanisms_of(positions="none", causal=False)


def test_odd_rope_dim(make_mechanism):
    for mechanism, odd in (
        (make_mechanism("mha", key_dim=7), 7),
        (make_mechanism("mla", rope_key_dim=5), 5),
        (make_mechanism("mla_paper", key_dim=9), 9),
    ):
        with pytest.raises(UserError, match=f"config.attention: .* {odd} rotated channels.*even"):
            _config(mechanism)
        _config(mechanism, positions="none")  # nothing is rotated
    _config(make_mechanism("mla", key_dim=7))  # only the RoPE key is rotated
    _config(make_mechanism("mha", value_dim=7))


def test_latents_are_no_wider_than_their_input_or_an_engines(make_mechanism):
    for name, key, most in (("mla", "latent_dim", 512), ("gqa", "query_rank", 16)):
        message = f"attention.{key} = {most + 1}: must be at most {most}; .*d_model = 16 channels"
        with pytest.raises(UserError, match=message):
            _config(make_mechanism(name, **{key: most + 1}))
        _config(make_mechanism(name, **{key: most}))


def test_partial_rope_of_no_channels_is_empty():
    """Shared KV and GTA may rotate no channels, whatever the fraction."""
    assert rope.frequencies(0, rope.Partial(100.0, 0.5)).shape == (0,)
    assert rope.frequencies(8, rope.Partial(100.0, 0.01)).astype(bool).sum() == 1


def test_mechanisms_and_layers_agree(make_mechanism):
    with pytest.raises(UserError, match="layer_ranks describes 2 layers.*num_layers = 3"):
        TransformerConfig(
            block=BlockConfig(**SHAPE), mechanisms=(make_mechanism("mha"),) * 2, vocab_size=32
        )


def test_layer_groups_are_runs_of_equal_mechanisms(make_mechanism):
    a, b = make_mechanism("lrkv"), make_mechanism("lrkv", rank=5)
    equal = dataclasses.replace(a)
    config = dataclasses.replace(_config(a), mechanisms=(a, equal, b))
    assert config.layer_groups == ((a, 2), (b, 1))
    assert dataclasses.replace(config, mechanisms=(a, b, a)).layer_groups == (
        (a, 1),
        (b, 1),
        (a, 1),
    )


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
    assert _config(plain, positions="sinusoidal").angle_limit == 2**20
    for positions in ("none", "learned"):
        assert _config(plain, positions=positions).angle_limit is None
