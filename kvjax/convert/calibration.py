"""Statistics of attention on calibration text, which conversions use to weigh errors."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Attention
from kvjax.convert.latent_fit import AttentionStatistics
from kvjax.convert.layerwise import LayerwisePass
from kvjax.convert.model import LazyModel
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError


def moments(model: LazyModel, rows_BT: np.ndarray) -> list[np.ndarray]:
    """Returns per layer the [E, E] second moment of attention's inputs, the mean of x x^T.

    The mean is over all tokens, in float32. A 1 is appended to x, so that the last row is x's mean.

    Raises:
      UserError: a layer's inputs are not finite.
    """
    by_layer, mechanisms = [], model.transformer.mechanisms
    with progress.waiting("calibrating") as doing:
        for i, sums in enumerate(LayerwisePass(model, rows_BT).layers(_second_moment)):
            doing.at(f"{i + 1} of {len(mechanisms)} layers")
            total_EE = sum(np.asarray(sum_EE, np.float64) for sum_EE in sums)
            if not np.isfinite(total_EE).all():
                raise UserError(f"layer {i} of {model.name}: its inputs on the text are not finite")
            moment_EE = (total_EE / rows_BT.size).astype(np.float32)
            by_layer.append(moment_EE)
    return by_layer


# Limits on the text of `sensitivities`, which holds probabilities [B, N, T, T] in memory.
_SENSITIVE_ROWS, _SENSITIVE_TOKENS = 8, 512


def sensitivities(model: LazyModel, rows_BT: np.ndarray) -> list[float]:
    """Returns per layer the weight of keys' errors relative to values' errors.

    To first order, with errors independent between tokens, a query's output changes by sum_s p_s
    e_s (v_s - o) under logit errors e and by sum_s p_s d_s under value errors d. With V(e) the
    variance of logit errors and S the lost share of the values' energy, the squared output errors
    of all heads are in the ratio V(e) w to S. This function measures w.
    """
    rows_BT, by_layer = rows_BT[:_SENSITIVE_ROWS, :_SENSITIVE_TOKENS], []
    with progress.waiting("comparing keys and values") as doing:
        for i, sums in enumerate(LayerwisePass(model, rows_BT).layers(_output_changes)):
            doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
            total_3N = np.sum(np.asarray(sums, np.float64), axis=0)
            logit_terms_N, squares_N, energy_N = total_3N
            mean_energy_N = energy_N / rows_BT.size
            total = np.sum(squares_N * mean_energy_N)
            by_layer.append(float(np.sum(logit_terms_N) / total) if total > 0 else 0.0)
    return by_layer


def attention_statistics(
    model: LazyModel, rows_BT: np.ndarray, moments: Sequence[np.ndarray]
) -> list[AttentionStatistics]:
    """Returns per layer the statistics that `latent_fit` needs, from some of each row's queries.

    Args:
      rows_BT: rows as long as later contexts: at distances that no row has, the fit may drop a
        rotation, and keys at these distances would get too much attention.
      moments: see `moments`; used for the mean of a layer's inputs.
    """
    mechanisms, by_layer = model.transformer.mechanisms, []
    num_queries = len(rows_BT) * len(_sampled_queries(rows_BT.shape[1]))
    with progress.waiting("measuring attention") as doing:
        for i, parts in enumerate(LayerwisePass(model, rows_BT).layers(_attention_sums)):
            doing.at(f"{i + 1} of {len(moments)} layers")
            distance_NT, changes_3N = (
                np.sum(np.asarray(sums, np.float64), axis=0) for sums in zip(*parts, strict=True)
            )
            logit_terms_N, squares_N, _ = changes_3N / num_queries
            mean_E = moments[i][-1] if mechanisms[i].bias else moments[i][-1, :-1]
            by_layer.append(AttentionStatistics(distance_NT, logit_terms_N, squares_N, mean_E))
    return by_layer


def _attention_sums(attention: Attention, h_BTD: jax.Array, positions, attend: dict):
    """Returns, for sampled queries, each head's attention by distance [N, S] and `_changes`."""
    S = h_BTD.shape[1]
    sampled_T = _sampled_queries(S)
    p_BNTS, slope_BNTS, v_BSNH = _probabilities(attention, h_BTD, positions, attend, sampled_T)
    distance_TS = np.maximum(sampled_T[:, None] - np.arange(S), 0)

    def by_distance(p_TS):
        return jnp.zeros(S).at[distance_TS].add(p_TS)

    distance_NS = jax.vmap(by_distance)(p_BNTS.sum(axis=0))
    return distance_NS, _changes(attention, p_BNTS, slope_BNTS, v_BSNH)


def _sampled_queries(length: int) -> np.ndarray:
    """Returns at most `_SENSITIVE_TOKENS` positions of a row, evenly spaced up to the last."""
    step = -(-length // _SENSITIVE_TOKENS)
    return np.arange(length - 1, -1, -step)[::-1]


def _probabilities(
    attention: Attention, h_BSD: jax.Array, positions, attend: dict, sampled_T=slice(None)
):
    """Returns attention's probabilities and slopes [B, N, T, S], and heads' values [B, S, N, H].

    A slope is the derivative of a logit with respect to q·k times the mechanism's scale; it is 1
    without a soft cap and `logit_factor`.

    Args:
      sampled_T: positions of the queries; default: all.
    """
    q_BSNH, raw = attention.mechanism.project(h_BSD, positions)
    k_BSKH, v_BSKH = attention.mechanism.keys_values(raw, positions)
    G, S = q_BSNH.shape[2] // k_BSKH.shape[2], q_BSNH.shape[1]
    k_BSNH, v_BSNH = (jnp.repeat(x, G, axis=2) for x in (k_BSKH, v_BSKH))
    factor, cap = attend["logit_factor"], attend["softcap"]
    scale = attention.mechanism.config.scale * factor
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BSNH[:, sampled_T], k_BSNH) * scale
    slope_BNTS = jnp.full_like(logits_BNTS, factor)
    if cap:
        tanh_BNTS = jnp.tanh(logits_BNTS / cap)
        logits_BNTS, slope_BNTS = cap * tanh_BNTS, factor * (1 - tanh_BNTS**2)
    visible = np.tri(S, dtype=bool) if attend["causal"] else np.ones((S, S), bool)
    if attend["window"]:
        visible &= ~np.tri(S, k=-attend["window"], dtype=bool)
    p_BNTS = jax.nn.softmax(jnp.where(visible[sampled_T], logits_BNTS, -jnp.inf), axis=-1)
    return p_BNTS, slope_BNTS, v_BSNH


def _output_changes(attention: Attention, h_BTD: jax.Array, positions, attend: dict) -> jax.Array:
    """Returns `_changes` of attention's probabilities and values."""
    return _changes(attention, *_probabilities(attention, h_BTD, positions, attend))


def _changes(
    attention: Attention, p_BNTS: jax.Array, slope_BNTS: jax.Array, v_BSNH: jax.Array
) -> jax.Array:
    """Returns [3, N]: sums over queries of sum_s (p_s slope_s)^2 |v_s - o|^2 and of sum_s p_s^2,
    and the sum over keys of |v_s|^2.

    Values are multiplied by their head's output projection.
    """
    gram_NHH = jnp.einsum("NHD,NID->NHI", attention.out[...], attention.out[...])

    def inner_product(x, y):
        return jnp.einsum("B...NH,NHI,B...NI->B...N", x, gram_NHH, y)

    o_BTNH = jnp.einsum("BNTS,BSNH->BTNH", p_BNTS, v_BSNH)
    energy_BSN, square_BNTS = inner_product(v_BSNH, v_BSNH), (p_BNTS * slope_BNTS) ** 2
    logit_terms_BTN = (
        jnp.einsum("BNTS,BSN->BTN", square_BNTS, energy_BSN)
        - 2 * inner_product(jnp.einsum("BNTS,BSNH->BTNH", square_BNTS, v_BSNH), o_BTNH)
        + jnp.einsum("BNTS->BTN", square_BNTS) * inner_product(o_BTNH, o_BTNH)
    )
    summed_BTN = jnp.einsum("BNTS->BTN", p_BNTS**2)
    return jnp.stack([x.sum(axis=(0, 1)) for x in (logit_terms_BTN, summed_BTN, energy_BSN)])


def _second_moment(attention: Attention, h_BTD: jax.Array, positions, attend: dict) -> jax.Array:
    """Returns [E, E], the sum of x x^T over a batch, with a 1 appended to x."""
    del attention, positions, attend
    h_BTE = jnp.concatenate([h_BTD, jnp.ones_like(h_BTD[..., :1])], axis=-1)
    return jnp.einsum("BTE,BTF->EF", h_BTE, h_BTE, precision="highest")
