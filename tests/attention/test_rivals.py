"""What other authors' mechanisms are special cases of, and the slips that would go unseen."""

import dataclasses

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention
from kvjax.attention import BranchedLatentConfig
from kvjax.attention import GroupedConfig
from kvjax.attention import GroupedLatentConfig
from kvjax.attention import LatentConfig
from kvjax.attention import ReusedKeysConfig
from kvjax.attention import SharedKVConfig
from kvjax.attention import TensorProductConfig
from kvjax.attention import TiedLatentConfig
from kvjax.layers import rope
from tests import reference

B, T, D, N, H, P = 2, 6, 24, 4, 8, 4
BASE = 100.0
X = np.random.default_rng(0).standard_normal((B, T, D))
COMMON = dict(num_heads=N, key_dim=H, norm_epsilon=1e-2)
BOTH = COMMON | dict(value_dim=H)
LATENT = BOTH | dict(latent_dim=6, rope_key_dim=P)

pytestmark = pytest.mark.usefixtures("x64")


def weights(randomise, config, seed=0):
    """An `Attention`'s weights, none zero."""
    return randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)), seed=seed)[1]


def module(config, w):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0))))
    arrays = {k: _arrays(v) for k, v in w.items()}
    return nnx.merge(graph, arrays)


def _arrays(tree):
    return {k: _arrays(v) for k, v in tree.items()} if isinstance(tree, dict) else jnp.asarray(tree)


def positions(config, base=BASE, first=0):
    return rope.positions(first + np.arange(T, dtype=np.int32)[None], config.rope_dim, base)


def run(config, w, base=BASE, x=X, first=0):
    """[B, T, D]."""
    attend = module(config, w)
    return np.asarray(attend(jnp.asarray(x), positions(config, base, first), causal=True))


def heads(config, w, base=BASE):
    """What the output projection gets of every head, [B, T, N, H]."""
    one_head = np.zeros((N, *w["out"].shape[1:]))
    outs = []
    for n in range(N):
        only = one_head.copy()
        only[n, :, : w["out"].shape[1]] = np.eye(w["out"].shape[1])
        outs.append(run(config, w | dict(out=only), base)[..., : w["out"].shape[1]])
    return np.stack(outs, axis=2)


def logits(config, w, base=BASE, x=X):
    """[B, N, T, T] of all queries with all keys."""
    mechanism = module(config, w).mechanism
    at = positions(config, base)
    q, raw = mechanism.project(jnp.asarray(x), at)
    k, _ = mechanism.keys_values(raw, at)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return config.scale * np.einsum("btnh,bsnh->bnts", q, k)


def changed(w, name, value):
    """The weights of the mechanism with another one."""
    return w | dict(mechanism=w["mechanism"] | {name: value})


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def moved(a, b, axis):
    """Along an axis, whether anything is different."""
    others = tuple(i for i in range(a.ndim) if i != axis)
    return (np.abs(a - b).max(axis=others) > 1e-6).tolist()


def noise(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture
def without_latent_norms(monkeypatch):
    """For what is equal but for the norm of latents, which there always is."""
    from kvjax.attention import gla
    from kvjax.attention import mechanism
    from kvjax.attention import mla

    for where in (mechanism, gla, mla):
        monkeypatch.setattr(where, "latent_norm", lambda *args, **options: lambda x: x)


# -- queries of a rank, MFA ------------------------------------------------------------------------


def test_a_query_of_a_rank_is_a_dense_one_but_for_its_norm(randomise, without_latent_norms):
    """MFA is then MQA with as large a head."""
    mfa = GroupedConfig(**BOTH, num_kv_heads=1, num_bases=1, rank=0, query_rank=5)
    w = weights(randomise, mfa)
    own = w["mechanism"]
    dense = np.einsum("dc,cnh->dnh", own["query_down"], own["query"])
    mqa = dataclasses.replace(mfa, query_rank=0)
    rest = {k: v for k, v in own.items() if not k.startswith("query")}
    close(run(mfa, w), run(mqa, w | dict(mechanism=rest | dict(query=dense))))


def test_a_latent_of_queries_is_normed_and_scaled(randomise):
    mfa = GroupedConfig(**BOTH, num_kv_heads=1, num_bases=1, rank=0, query_rank=6)
    w = weights(randomise, mfa)
    own = w["mechanism"]
    latent = module(mfa, w).mechanism.query_input(jnp.asarray(X))
    close(latent, reference.rms(X @ own["query_down"], mfa.norm_epsilon))
    scaled = dataclasses.replace(mfa, latent_scale=True)
    close(module(scaled, w).mechanism.query_input(jnp.asarray(X)), 2 * latent)  # sqrt(24/6)


def test_reused_keys_without_their_gate_are_q_k_is_v(randomise):
    reused = ReusedKeysConfig(**COMMON, num_kv_heads=2, query_rank=5)
    w = changed(weights(randomise, reused), "value_gate", np.zeros(H))
    own = {k: v for k, v in w["mechanism"].items() if not k.startswith("value")}
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", query_rank=5)
    close(run(reused, w), run(tied, w | dict(mechanism=own)))


def test_gate_and_map_of_reused_keys_move_no_logit(randomise):
    reused = ReusedKeysConfig(**COMMON, num_kv_heads=1)
    w = weights(randomise, reused)
    for name, shape in (("value_gate", (H,)), ("value_map", (H, H))):
        other = changed(w, name, noise(shape))
        np.testing.assert_array_equal(logits(reused, other), logits(reused, w))
        assert moved(run(reused, other), run(reused, w), 2) == [True] * D


# -- GLA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_rank", [0, 5])
def test_one_latent_is_mla(randomise, query_rank):
    options = dict(qk_norm="rms_gain", latent_scale=True, query_rank=query_rank)
    mla, gla = LatentConfig(**LATENT, **options), _gla(1, **options)
    w = weights(randomise, mla)
    own = dict(w["mechanism"])
    own["down"] = own["down"][:, None]
    for name in ("up_key", "up_value"):
        own[name] = own[name][None]
    own["latent_norm"] = dict(gain=own["latent_norm"]["gain"][None])
    close(run(gla, w | dict(mechanism=own)), run(mla, w))


def _gla(J, **options):
    return GroupedLatentConfig(**LATENT, num_latents=J, **options)


def test_groups_are_mla_with_zeros_but_for_norms(randomise, without_latent_norms):
    gla = _gla(2)
    w = weights(randomise, gla)
    own = dict(w["mechanism"])
    own["down"] = own["down"].reshape(D, -1)
    for name in ("up_key", "up_value"):
        up = np.zeros((2, 6, N, H))
        for j in range(2):
            up[j, :, 2 * j : 2 * j + 2] = own[name][j]
        own[name] = up.reshape(12, N, H)
    mla = LatentConfig(**LATENT | dict(latent_dim=12))
    close(run(gla, w), run(mla, w | dict(mechanism=own)))


def test_a_latent_moves_its_own_heads_and_the_rotated_key_all(randomise):
    """Groups are neighbours: heads 0 and 1, not 0 and 2."""
    gla = _gla(2)
    w = weights(randomise, gla)
    down = w["mechanism"]["down"].copy()
    down[:, 0] = noise((D, 6))
    assert moved(heads(gla, changed(w, "down", down)), heads(gla, w), 2) == [True] * 2 + [False] * 2
    other = changed(w, "rope_key", noise((D, P)))
    assert moved(heads(gla, other), heads(gla, w), 2) == [True] * N


@pytest.mark.parametrize(
    "config", [_gla(2), BranchedLatentConfig(**LATENT, num_branches=2, num_latents=2)]
)
def test_scales_are_of_whole_keys_and_of_a_latents_own_width(randomise, config):
    assert config.scale == (H + P) ** -0.5
    w = weights(randomise, config)
    of = lambda config: module(config, w).mechanism.project(jnp.asarray(X), positions(config))[1]
    scaled = dataclasses.replace(config, latent_scale=True)
    close(
        of(scaled)["latent"], 2 * of(config)["latent"]
    )  # sqrt(24/6), not of all latents' 12 or 24


# -- MLRA ------------------------------------------------------------------------------------------


def _mlra(G, J, **options):
    return BranchedLatentConfig(**LATENT, num_branches=G, num_latents=J, **options)


@pytest.mark.parametrize("G, J", [(2, 2), (4, 1)])
def test_branches_are_gla_with_more_heads(randomise, G, J):
    """Of G·N heads with the same queries, and the same output projection over sqrt(G)."""
    mlra = _mlra(G, J)
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    for name in ("query", "rope_query"):
        own[name] = np.tile(own[name], (1, G, 1))
    own["down"] = own["down"].reshape(D, G * J, -1)
    for name in ("up_key", "up_value"):
        own[name] = own[name].reshape(G * J, *own[name].shape[2:])
    out = np.tile(w["out"], (G, 1, 1)) / np.sqrt(G)
    gla = GroupedLatentConfig(**LATENT | dict(num_heads=G * N), num_latents=G * J)
    close(run(mlra, w), run(gla, w | dict(mechanism=own, out=out)))


@pytest.mark.parametrize("J", [1, 2])
def test_one_branch_is_gla(randomise, J):
    mlra = _mlra(1, J, qk_norm="rms_gain")
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    own["down"] = own["down"][:, 0]
    for name in ("up_key", "up_value"):
        own[name] = own[name][0]
    own["latent_norm"] = dict(gain=own["latent_norm"]["gain"][0])
    close(run(mlra, w), run(_gla(J, qk_norm="rms_gain"), w | dict(mechanism=own)))


def test_four_equal_branches_are_twice_one(randomise):
    one, four = _mlra(1, 1), _mlra(4, 1)
    w = weights(randomise, one)
    own = dict(w["mechanism"])
    own["down"] = np.repeat(own["down"], 4, axis=1)
    for name in ("up_key", "up_value"):
        own[name] = np.repeat(own[name], 4, axis=0)
    close(run(four, w | dict(mechanism=own)), 2 * run(one, w))


def test_branches_are_not_mla(randomise, without_latent_norms):
    """The sum over blocks of the key stands outside of the softmax."""
    mlra, mla = _mlra(4, 1), LatentConfig(**LATENT | dict(latent_dim=24))
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    own["down"] = own["down"].reshape(D, 24)
    for name in ("up_key", "up_value"):
        own[name] = own[name].reshape(24, N, H)
    assert np.abs(run(mlra, w) - run(mla, w | dict(mechanism=own))).max() > 0.01


def test_a_latent_of_a_branch_moves_its_half_of_the_heads(randomise):
    mlra = _mlra(2, 2)
    w = weights(randomise, mlra)
    down = w["mechanism"]["down"].copy()
    down[:, 0, 0] = noise((D, 6))
    other = heads(mlra, changed(w, "down", down))
    assert moved(other, heads(mlra, w), 2) == [True] * 2 + [False] * 2


# -- GTA -------------------------------------------------------------------------------------------


def _gta(P, **options):
    return TiedLatentConfig(**COMMON, num_kv_heads=2, rope_key_dim=P, **options)


def test_without_a_rotated_key_keys_are_values(randomise):
    gta = _gta(0, qk_norm="none")
    w = weights(randomise, gta)
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", qk_norm="none")
    own = dict(query=w["mechanism"]["query"], base_key=w["mechanism"]["latent"])
    close(run(gta, w), run(tied, w | dict(mechanism=own), base=None))


def test_the_last_channels_of_values_move_outputs_and_no_logit(randomise):
    gta = _gta(P)
    w = weights(randomise, gta)
    latent = w["mechanism"]["latent"].copy()
    latent[:, :, H - P :] = noise((D, 2, P))
    other = changed(w, "latent", latent)
    np.testing.assert_array_equal(logits(gta, other), logits(gta, w))
    assert moved(heads(gta, other), heads(gta, w), 3) == [False] * (H - P) + [True] * P


def test_kv_heads_are_read_by_neighbours_and_the_rotated_key_by_all(randomise):
    gta = _gta(P)
    w = weights(randomise, gta)
    assert gta.scale == H**-0.5
    latent = w["mechanism"]["latent"].copy()
    latent[:, 0] = noise((D, H))
    other = heads(gta, changed(w, "latent", latent))
    assert moved(other, heads(gta, w), 2) == [True] * 2 + [False] * 2
    other = changed(w, "rope_key", noise((D, P)))
    assert moved(heads(gta, other), heads(gta, w), 2) == [True] * N


# -- one vector as key and value -------------------------------------------------------------------


def _shared(P, **options):
    return SharedKVConfig(**COMMON, num_kv_heads=2, rope_key_dim=P, **options)


def test_only_relative_positions_count(randomise, monkeypatch):
    """Values are rotated too: without the turn back they would tell where they stood."""
    shared = _shared(P)
    w = weights(randomise, shared)
    close(run(shared, w, first=70), run(shared, w))
    from kvjax.attention import shared_kv

    monkeypatch.setattr(shared_kv.SharedKV, "combine", lambda self, o, positions: o)
    assert np.abs(run(shared, w, first=70) - run(shared, w)).max() > 0.01


def test_without_rotation_values_are_normed_keys(randomise):
    shared = _shared(0)
    w = weights(randomise, shared)
    mechanism = module(shared, w).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(shared))
    k, v = mechanism.keys_values(raw, positions(shared))
    close(k, v)
    expected = np.einsum("btd,dkh->btkh", X, w["mechanism"]["latent"])
    close(k, reference.rms(expected, shared.norm_epsilon))
    close(run(shared, w), run(shared, w, base=None))
    assert list(shared.entry()) == ["latent"]


# -- TPA -------------------------------------------------------------------------------------------


def _tpa(R, **options):
    options = dict(query_factors=0, qk_norm="none") | options
    return TensorProductConfig(**BOTH, key_rank=R, value_rank=R, **options)


@pytest.mark.parametrize("R", [1, 2, N])
def test_constant_head_factors_that_choose_are_gqa(randomise, R):
    """A constant channel of the input makes a = R·mask, where the mask says who reads which."""
    tpa = _tpa(R)
    w = weights(randomise, tpa)
    own = dict(w["mechanism"])
    x = X.copy()
    x[..., 0] = 1.0
    mask = np.zeros((D, N, R))
    for n in range(N):
        mask[0, n, n * R // N] = R
    own["key_head"] = own["value_head"] = mask
    gqa = GroupedConfig(**BOTH, num_kv_heads=R, num_bases=R, rank=0, qk_norm="none")
    of_gqa = dict(query=own["query"], base_key=own["key_factor"], base_value=own["value_factor"])
    close(run(tpa, w | dict(mechanism=own), x=x), run(gqa, w | dict(mechanism=of_gqa), x=x))


def test_factors_can_be_doubled_scaled_and_permuted(randomise):
    tpa = _tpa(2)
    w = weights(randomise, tpa)
    own, expected = w["mechanism"], run(tpa, w)
    names = ("key_head", "value_head", "key_factor", "value_factor")
    along = lambda name: 2 if name.endswith("head") else 1
    twice = {name: np.concatenate([own[name]] * 2, axis=along(name)) for name in names}
    close(run(_tpa(4), w | dict(mechanism=own | twice)), expected)  # a mean, not a sum
    permuted = {name: np.flip(own[name], axis=along(name)) for name in names}
    close(run(tpa, w | dict(mechanism=own | permuted)), expected)
    scaled = own | dict(key_head=own["key_head"] * 3, key_factor=own["key_factor"] / 3)
    close(run(tpa, w | dict(mechanism=scaled)), expected)


def test_keys_of_a_token_have_the_rank_of_their_factors(randomise):
    tpa = _tpa(2)
    mechanism = module(tpa, weights(randomise, tpa)).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(tpa))
    k, _ = mechanism.keys_values(raw, positions(tpa))
    values = np.linalg.svd(np.asarray(k[0, 3]), compute_uv=False)
    assert values[1] > 0.01 and values[2] < 1e-12


def test_factors_that_are_rotated_are_keys_that_are(randomise):
    """And a normed key has a length of 1, read back from its factors."""
    tpa = _tpa(2, qk_norm="rms")
    tpa = dataclasses.replace(tpa, norm_epsilon=0.0)
    mechanism = module(tpa, weights(randomise, tpa)).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(tpa))
    entry = mechanism.encode(raw, positions(tpa))
    k = np.einsum("btnr,btrh->btnh", entry["key_head"], entry["key_factor"])
    close(np.mean(k**2, -1), 1.0)
    close(k, mechanism.keys_values(raw, positions(tpa))[0])


def test_xavier_starts_factors_as_the_authors_do():
    config = TensorProductConfig(
        **dict(num_heads=6, key_dim=64, value_dim=64, query_factors=6, key_rank=2, value_rank=2),
        factor_init="xavier",
    )
    mechanism = config.build(256, rngs=nnx.Rngs(0))
    std = lambda w: float(np.std(np.asarray(w[...])))
    assert std(mechanism.key_head) == pytest.approx((2 / (2 * (6 + 256))) ** 0.5, rel=0.05)
    assert std(mechanism.key_factor) == pytest.approx((2 / (64 * (2 + 256))) ** 0.5, rel=0.05)
    assert std(mechanism.query_factor) == pytest.approx((2 / (64 * (6 + 256))) ** 0.5, rel=0.05)


# -- all -------------------------------------------------------------------------------------------

PARAMETERS = [  # of one layer without gates, norms' gains and the output projection
    (_gla(2), D * N * (H + P) + D * (2 * 6 + P) + 6 * N * 2 * H),
    (_gla(2, query_rank=5), D * 5 + 5 * N * (H + P) + D * (12 + P) + 6 * N * 2 * H),
    (_mlra(2, 2), D * N * (H + P) + D * (4 * 6 + P) + 2 * 6 * N * 2 * H),
    (_mlra(4, 1), D * N * (H + P) + D * (4 * 6 + P) + 4 * 6 * N * 2 * H),
    (_gta(P), D * N * H + D * 2 * H + D * P),
    (_shared(P), D * N * H + D * 2 * H),
    (ReusedKeysConfig(**COMMON, num_kv_heads=1), D * N * H + D * H + H * H + H),
    (_tpa(2, query_factors=3), D * (N + H) * (3 + 2 + 2)),
    (_tpa(2), D * (N + H) * (2 + 2) + D * N * H),
    (_tpa(2, fixed="heads"), D * H * 4 + N * 4 + D * N * H),
    (_tpa(2, fixed="channels"), D * N * 4 + H * 4 + D * N * H),
    (_tpa(2, shared_factors=True), D * N * 4 + D * H * 2 + D * N * H),
]


@pytest.mark.parametrize("config, expected", PARAMETERS, ids=lambda v: type(v).__name__)
def test_parameters(randomise, config, expected):
    w = weights(randomise, config)
    count = lambda tree: sum(map(count, tree.values())) if isinstance(tree, dict) else tree.size
    assert count(w["mechanism"]) == expected
    assert w["out"].size == N * config.value_dim * D


@pytest.mark.parametrize(
    "config",
    [
        _tpa(2, fixed="heads", qk_norm="rms_gain", output_gate=True),
        _tpa(2, fixed="channels", qk_norm="rms_gain", query_factors=3),
        _tpa(2, shared_factors=True, qk_norm="rms_gain", query_rank=5, latent_scale=True),
        _tpa(3, shared_factors=True, fixed="heads"),
        _gla(2, latent_scale=True, output_gate=True),
        _shared(P, latent_scale=True, query_rank=5, output_gate=True),
    ],
    ids=lambda c: f"{type(c).__name__}-{c.query_rank}-{getattr(c, 'fixed', '')}",
)
def test_options_are_those_of_the_reference(randomise, config):
    w = weights(randomise, config)
    close(run(config, w), reference.attention(config, w, X, base=BASE, causal=True))


def test_a_gate_multiplies_each_channel_of_each_head(randomise):
    gated = _gta(P, output_gate=True)
    w = weights(randomise, gated)
    bare = dataclasses.replace(gated, output_gate=False)
    without = {k: v for k, v in w.items() if k != "gate"}
    gate = 1 / (1 + np.exp(-np.einsum("btd,dnh->btnh", X, w["gate"])))
    close(heads(gated, w), heads(bare, without) * gate)
