"""Puts factors in place of a layer's projections: balanced, absorbed or multiplied out."""

import dataclasses

import numpy as np

from kvjax.convert import factors, layer as layer_lib
from kvjax.convert.factors import einsum
from kvjax.convert.layer import BasisChange, Layer


def basis_changes(
    layer: Layer, moment_EE: np.ndarray, objective: str
) -> tuple[BasisChange, BasisChange]:
    """Returns the basis changes of keys and values: whitening for "outputs", else the identity."""
    if objective == "outputs":
        return layer_lib.whitening(layer, moment_EE)
    return (
        layer_lib.identity_change(*layer.key_EKH.shape[1:]),
        layer_lib.identity_change(*layer.value_EKH.shape[1:]),
    )


def balanced(fit: factors.Factors, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Returns latents and up-projections of balanced scale, see `factors.balance_scales`."""
    latent_EJR, expand_KRH = fit.latent_EJR, fit.expand_KRH
    J, (K, R, H) = latent_EJR.shape[1], expand_KRH.shape
    expand_JKRH = expand_KRH.reshape(J, -1, R, H)
    scale_JR = factors.balance_scales(layer.weights_of(latent_EJR), expand_JKRH, ((0,), (1, 3)))
    return latent_EJR * scale_JR, (expand_JKRH / scale_JR[:, None, :, None]).reshape(K, R, H)


def multiplied_out(fit: factors.Factors) -> np.ndarray:
    """Multiplies factors out to [E, K, H]."""
    E, J, R = fit.latent_EJR.shape
    expand_JKRH = fit.expand_KRH.reshape(J, -1, R, fit.expand_KRH.shape[-1])
    whole_EJKH = einsum("EJR,JKRH->EJKH", fit.latent_EJR, expand_JKRH)
    return whole_EJKH.reshape(E, -1, whole_EJKH.shape[-1])


def absorb_into_queries(layer: Layer, expand_KRH: np.ndarray) -> Layer:
    """Multiplies the keys' up-projection into the queries (thin keys, eq. 12).

    The mechanism divides logits by sqrt(R) instead of sqrt(H): queries are scaled to compensate.
    """
    E, N, H = layer.query_ENH.shape
    K, R, _ = expand_KRH.shape
    query_EKGH = layer.query_ENH.reshape(E, K, N // K, H)
    query_EKGR = einsum("EKGH,KRH->EKGR", query_EKGH, expand_KRH) * (R / H) ** 0.5
    sides = layer.weights_of(layer.key_EKH), layer.weights_of(query_EKGR)
    scale_KR = factors.balance_scales(*sides, ((0,), (0, 2)))
    query_EKGR = query_EKGR / scale_KR[:, None]
    key_EKR = layer.key_EKH * scale_KR
    return dataclasses.replace(layer, query_ENH=query_EKGR.reshape(E, N, R), key_EKH=key_EKR)


def absorb_into_outputs(layer: Layer, expand_KRH: np.ndarray) -> Layer:
    """Multiplies the values' up-projection into the outputs; the latents become the values."""
    N, H, D = layer.out_NHD.shape
    K, R, _ = expand_KRH.shape
    out_KGHD = layer.out_NHD.reshape(K, N // K, H, D)
    out_KGRD = einsum("KRH,KGHD->KGRD", expand_KRH, out_KGHD)
    scale_KR = factors.balance_scales(layer.weights_of(layer.value_EKH), out_KGRD, ((0,), (1, 3)))
    out_KGRD = out_KGRD / scale_KR[:, None, :, None]
    value_EKR = layer.value_EKH * scale_KR
    return dataclasses.replace(layer, out_NHD=out_KGRD.reshape(N, R, D), value_EKH=value_EKR)


def attention_weights(
    layer: Layer, projections: dict[str, np.ndarray], **expand: np.ndarray
) -> dict:
    """Returns the weights of an `Attention`, with the layer's outputs and norms.

    Args:
      projections: arrays [E, ...] by name, with the bias as a last row if the layer has biases.
      expand: up-projections by name, without biases.
    """
    inner = dict(expand)
    for name, w in projections.items():
        inner[name] = w[:-1] if layer.has_biases else w
        if layer.has_biases:
            inner[f"{name}_bias"] = w[-1]
    inner |= {name: dict(gain=gain_H) for name, gain_H in layer.gains.items()}
    weights = dict(out=layer.out_NHD, mechanism=inner)
    if layer.out_bias_D is not None:
        weights["out_bias"] = layer.out_bias_D
    return weights
