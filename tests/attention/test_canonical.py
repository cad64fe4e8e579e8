"""Changes of basis before quantising: outputs stay, and every channel counts equally."""

from flax import nnx, traverse_util
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, canonical, named
from kvjax.cache import quantized
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.cache_layouts import GroupedInputs
from tests import quick
from tests.attention import law, one_layer
from tests.attention.test_law import CASES, _case_config, _id


def _flat(weights):
    return traverse_util.flatten_dict(weights, sep="/")


def _changed(config, weights):
    """Returns the weights in the new basis, and those that changed."""
    changed = canonical.change_basis(config, _flat(weights))
    return traverse_util.unflatten_dict(_flat(weights) | changed, sep="/"), changed


QUICK = [next(case for case in CASES if case[0] == kind) for kind in ("grouped", "mla", "gta")]


@pytest.mark.parametrize("kind, row", quick.only(QUICK, CASES), ids=_id)
def test_outputs_and_decoding_stay(x64, randomise, kind, row):
    """On whole rows; and decoding over keys in their own basis equals them, by the law."""
    config, base, softcap = _case_config(kind, row)
    module, weights = randomise(lambda: Attention(config, law.D, rngs=nnx.Rngs(0)))
    new, changed = _changed(config, weights)
    module.spreads_keys = True
    graph = nnx.split(module)[0]
    options = dict(softcap=softcap)
    before = law.Run(config, base, graph, weights, jnp.float64, **options)
    after = law.Run(config, base, graph, new, jnp.float64, **options)
    x = law.sequences()
    expected = before.full(x)
    near = dict(rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(after.full(x), expected, **near)
    y = after.decoded(x, law.ONE_OF_ALL)
    np.testing.assert_allclose(y[~np.isnan(y)], expected[~np.isnan(y)], **near)
    fixed = config.output_gate or getattr(config, "tie", "none") in ("kv", "qkv")
    gained = kind in ("gta", "shared_kv") and config.qk_norm == "rms_gain"
    assert changed or fixed or gained or kind == "mfa_kr"


@pytest.mark.parametrize("name", ["lrkv", "lrkv_gqa", "factored_joint", "mla_paper", "mla_lrkv"])
def test_what_expands_latents_has_orthonormal_rows(make_mechanism, randomise, name):
    config = make_mechanism(name)
    weights = one_layer.weights(randomise, config)
    _, changed = _changed(config, weights)
    found = 0
    for path, w in changed.items():
        if "expand" in path:
            K, R, H = w.shape
            J = getattr(config, "num_latents", K)
            rows = w.reshape(J, K // J, R, H).swapaxes(1, 2).reshape(J, R, -1)
            ones = np.broadcast_to(np.eye(R), (J, R, R))
            np.testing.assert_allclose(rows @ rows.swapaxes(1, 2), ones, atol=1e-12)
            found += 1
    if name == "mla_paper":
        ups = [changed[f"mechanism/up_{kind}"].reshape(10, -1) for kind in ("key", "value")]
        rows = np.concatenate(ups, axis=1)
        np.testing.assert_allclose(rows @ rows.T, np.eye(10), atol=1e-12)
        found += 1
    assert found


@pytest.mark.parametrize("n", [1, 2, 6, 10, 46, 64, 72])
def test_spreading_is_orthogonal_and_flat(n):
    matrix = canonical.spread_matrix(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    assert np.abs(matrix).max() <= np.sqrt(2 / n) * (1 + 1e-12)


def test_int4_loses_less_of_keys_with_an_outlier_channel_once_they_are_spread():
    """Logits themselves stay."""
    config, random = named.mha(2, head_dim=32), np.random.default_rng(0)
    k_BSKH, q_BTNH = random.standard_normal((2, 1, 64, 2, 32))
    k_BSKH[..., 5] *= 20
    layer = {
        name: jnp.zeros((1, *field.shape, 64), field.dtype)
        for name, field in quantized.stored(
            {"base_key": config.entry()["base_key"]}, 4, "MHA"
        ).items()
    }
    lost = {}

    def logits(q_BTNH, k_BSKH):
        return np.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSKH)

    inputs = GroupedInputs(query=jnp.asarray(q_BTNH, jnp.float32), scale=1.0)
    spread = canonical.spread_keys(config, {"base_key": jnp.asarray(k_BSKH, jnp.float32)}, inputs)
    for name, entry, q in (
        ("stored", {"base_key": jnp.asarray(k_BSKH)}, q_BTNH),
        ("spread", spread[0], spread[1].query),
    ):
        z = logits(q, entry["base_key"])
        np.testing.assert_allclose(z, logits(q_BTNH, k_BSKH), rtol=1e-4, atol=1e-4)
        kept = {n: jnp.moveaxis(x, 1, -1) for n, x in quantized.quantize(entry, layer).items()}
        read = jnp.moveaxis(quantized.dequantize(kept, jnp.float32)["base_key"], -1, 1)
        lost[name] = np.abs(logits(q, read) - z).mean()
    assert lost["spread"] < lost["stored"] / 2, lost


def test_a_damaged_weight_is_named(make_mechanism, randomise):
    config = make_mechanism("lrkv")
    weights = one_layer.weights(randomise, config)
    weights["mechanism"]["latent_key"][0, 0, 0] = np.nan
    with pytest.raises(UserError, match="a layer: the weight mechanism/latent_key has NaN or inf"):
        _changed(config, weights)
