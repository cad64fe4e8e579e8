"""Measures the errors of cutting keys at equal rank by several methods, on texts."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import (
    activations,
    heads as heads_lib,
    key_drift,
    key_subspaces,
    logits,
    spectrum,
    subspace_methods,
)
from kvjax.analysis.measures.activations import Layer
from kvjax.analysis.measures.cut_keys import Cut, Runs
from kvjax.analysis.measures.heads import Heads
from kvjax.analysis.measures.key_subspaces import Rope, Subspaces
from kvjax.analysis.measures.subspace_methods import AFTER, CALIBRATED, Method
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError

SHARE = 0.9  # share of the energy that the counted components hold

# Matrices whose spectra are measured.
SPECTRUM_WEIGHTS = "W_K of each head"
SPECTRUM_JOINT = "W_K of all heads together"
SPECTRUM_INTERACTION = "M = W_Q W_K^T of each head"
SPECTRUM_KEYS = "keys of each head on a text"
SPECTRUM_CENTRED = "the same less their mean"
SPECTRUM_LOGITS = "logits E of each head on a text"
OF_WEIGHTS = (SPECTRUM_WEIGHTS, SPECTRUM_JOINT, SPECTRUM_INTERACTION)
_ROUNDING = 1e-9  # singular values below this share of the largest are rounding errors


@dataclasses.dataclass(frozen=True)
class CompressionMeasurements:
    """Errors by method, over the heads of all layers.

    B are the measured rows of `subspace_methods.Windows`.

    Attributes:
      key_dim: H of the widest heads, which `ranks` refer to.
      shares: shares of a key's channels that are kept.
      ranks: the same as numbers of channels.
      length: tokens per row; errors and losses are measured on its second half.
      texts_B, later: as in `Windows`.
      errors: [B, heads, ranks, 2] `key_subspaces.CutErrors` by method; nan for ranks that the
        method's tokens do not determine.
      nats: [B, tokens] losses by method and share; key None: the unmodified model.
      spectra: by matrix, [B or 1, heads, 3]: components for 90 % of the energy; the largest
        possible number (the rank of weights, else channels); channels.
      drift_rank: rank of the subspaces whose drift is measured.
      drift_length: tokens of the text that the drift is measured on.
      drift_at: counts of tokens that the first tokens' subspaces are computed from.
      overlap: by place, [texts, KV heads, counts, 2] overlaps with the subspace of all tokens: of
        the first tokens' subspace, and of that of equally many spread tokens.
      drift_error: by place, [texts, heads, 2 counts + 2] errors of later logits with keys cut to
        the subspace of the first tokens (counts), of spread tokens (counts), of all tokens, and
        to the fixed one (nan if there is none).
    """

    key_dim: int
    shares: tuple[float, ...]
    ranks: tuple[int, ...]
    length: int
    texts_B: np.ndarray
    later: bool
    errors: Mapping[Method, np.ndarray]
    nats: Mapping[tuple[Method, float] | None, np.ndarray]
    spectra: Mapping[str, np.ndarray]
    drift_rank: int
    drift_length: int
    drift_at: tuple[int, ...]
    overlap: Mapping[str, np.ndarray]
    drift_error: Mapping[str, np.ndarray]


def measure(
    model: LazyModel, texts: Mapping[str, np.ndarray], length: int, longest: int
) -> CompressionMeasurements:
    """Measures all methods. Subspaces are computed from activations of the unmodified model.

    Args:
      length: tokens per row.
      longest: tokens of each text that drift is measured on.

    Raises:
      UserError: activations or losses are not finite.
    """
    windows = subspace_methods.windows(texts, length, longest)
    dims = [mechanism.query_dim for mechanism in model.transformer.mechanisms]
    kept, H = subspace_methods.shares(min(dims)), max(dims)
    arrays_by_name = collections.defaultdict(list)
    with progress.waiting("keys of low rank") as doing:
        ropes, fixed, nats = _by_method(model, windows, kept, arrays_by_name, doing)
        doing.now("drift of subspaces")
        r = key_drift.rank(H, longest)
        counts = key_drift.prefix_lengths(longest, r)
        longest_BT = np.stack([tokens_T[:longest] for tokens_T in texts.values()])
        for i, layer in enumerate(activations.layers(model, longest_BT)):
            doing.at(f"{i + 1} of {len(dims)} layers")
            _drift(layer, ropes[i], fixed[i], counts, arrays_by_name)

    def by_kind(name):
        return {
            key[1]: np.concatenate(arrays, axis=1)
            for key, arrays in arrays_by_name.items()
            if key[0] == name
        }

    return CompressionMeasurements(
        key_dim=H,
        shares=kept,
        ranks=tuple(subspace_methods.rank(share, H) for share in kept),
        length=windows.length,
        texts_B=windows.texts_B,
        later=windows.later,
        errors=by_kind("errors"),
        nats=nats,
        spectra=by_kind("spectrum"),
        drift_rank=r,
        drift_length=longest,
        drift_at=counts,
        overlap=by_kind("overlap"),
        drift_error=by_kind("drift"),
    )


def _by_method(
    model: LazyModel,
    windows: subspace_methods.Windows,
    kept: Sequence[float],
    arrays_by_name: Mapping[tuple[str, Method | str], list],
    doing: progress.waiting,
) -> tuple[list[Rope], list[dict[str, list[Subspaces | None]]], dict]:
    """Appends errors and spectra of each layer to `arrays_by_name`.

    Returns:
      The RoPE of each layer; by layer and place, each text's fixed subspace (or None); the losses
      of each run.
    """
    joint = subspace_methods.has_joint_svd(model.transformer.mechanisms)
    # In a model with RoPE, a layer without it has the same keys "before" and "after" RoPE.
    rotates = any(kind.rope_base is not None for kind in model.transformer.block.layer_kinds)
    ropes, fixed, runs = [], [], None
    layers = zip(heads_lib.layers(model), activations.layers(model, windows.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
        with few_threads(heads.key_DKH.shape[2]):
            subspaces = subspace_methods.of_layer(
                heads, layer, windows, rotates=rotates, joint=joint
            )
            for name, numbers in _spectra(heads, layer, len(windows.texts_B), joint).items():
                arrays_by_name["spectrum", name].append(numbers)
        for method, errors in _errors(heads, layer, subspaces, kept, windows).items():
            arrays_by_name["errors", method].append(errors)
        cuts = {
            (method, share): Cut(
                of_rows, subspace_methods.rank_of(method, share, heads), method[1] == AFTER
            )
            for method, of_rows in subspaces.items()
            for share in kept
            if subspace_methods.is_run(method, share) and _has_tokens(windows, method, share, heads)
        }
        runs = runs or Runs(model, windows.measured_BT[:, :-1], [None, *cuts])
        runs.layer(i, cuts, heads.rotated)
        ropes.append(key_subspaces.rope_of(heads))
        fixed.append(_fixed(subspaces, windows))
    doing.now("perplexity with keys of low rank")
    targets_BT = windows.measured_BT[:, 1:][:, windows.length // 2 :]
    nats = runs.losses(targets_BT)
    if not all(np.isfinite(nats_BT).all() for nats_BT in nats.values()):
        raise UserError(f"losses of {model.name} on the text are not finite: check its weights")
    return ropes, fixed, nats


def _has_tokens(
    windows: subspace_methods.Windows, method: Method, share: float, heads: Heads
) -> bool:
    """Returns True if a method's tokens determine a subspace with this share of the channels."""
    return windows.enough_tokens(method, subspace_methods.rank(share, heads.key_DKH.shape[2]))


def _fixed(
    subspaces: Mapping[Method, Sequence[Subspaces]], windows: subspace_methods.Windows
) -> dict[str, list[Subspaces | None]]:
    """Returns by place each text's fixed subspaces; None without text to compute them from."""
    _, first = np.unique(windows.texts_B, return_index=True)
    no_subspaces = [None] * len(windows.texts_B)
    return {
        where: [subspaces.get((CALIBRATED, where), no_subspaces)[b] for b in first]
        for where in dict.fromkeys(where for _, where in subspaces)
    }


def _errors(
    heads: Heads,
    layer: Layer,
    subspaces: Mapping[Method, Sequence[Subspaces]],
    kept: Sequence[float],
    windows: subspace_methods.Windows,
) -> dict[Method, np.ndarray]:
    """Returns a layer's `CompressionMeasurements.errors`."""
    length, rope = layer.key_BTKH.shape[1], key_subspaces.rope_of(heads)
    queries, by_method = key_drift.later_queries(length), collections.defaultdict(list)
    for b in range(len(next(iter(subspaces.values())))):
        with few_threads(heads.key_DKH.shape[2]):
            cuts = [
                subspace_methods.cut_keys(
                    layer,
                    rope,
                    b,
                    method[1],
                    of_rows[b],
                    subspace_methods.rank_of(method, share, heads),
                )
                for method, of_rows in subspaces.items()
                for share in kept
            ]
        errors_NA2 = np.stack(key_subspaces.errors(layer, b, cuts, queries), axis=-1)
        for method, errors_NR2 in zip(
            subspaces, np.split(errors_NA2, len(subspaces), axis=1), strict=True
        ):
            enough = np.array([_has_tokens(windows, method, share, heads) for share in kept])
            by_method[method].append(np.where(enough[:, None], errors_NR2, np.nan))
    return {method: np.stack(arrays) for method, arrays in by_method.items()}


def _spectra(heads: Heads, layer: Layer, B: int, joint: bool) -> dict[str, np.ndarray]:
    """Returns a layer's `CompressionMeasurements.spectra`."""
    D, K, H = heads.key_DKH.shape

    def energies(x_LH):
        return np.linalg.svd(np.linalg.qr(x_LH, mode="r"), compute_uv=False) ** 2

    energies_by_matrix = {SPECTRUM_WEIGHTS: energies(heads.key_DKH.swapaxes(0, 1))[None]}
    if joint:
        energies_by_matrix[SPECTRUM_JOINT] = energies(heads.key_DKH.reshape(1, 1, D, K * H))
    energies_by_matrix[SPECTRUM_INTERACTION] = logits.Interaction(heads).energies()[None]
    key_BKTH = layer.plain_key_BTKH[:B].astype(np.float64).swapaxes(1, 2)
    energies_by_matrix[SPECTRUM_KEYS] = energies(key_BKTH)
    energies_by_matrix[SPECTRUM_CENTRED] = energies(key_BKTH - key_BKTH.mean(axis=2, keepdims=True))
    rows = zip(layer.query_BTNH[:B], layer.key_BTKH, strict=False)
    energies_by_matrix[SPECTRUM_LOGITS] = np.stack(
        [logits.centred_logits(query, key, layer.scale).energies_NR for query, key in rows]
    )
    ranks_by_matrix = {}
    for name, energy in energies_by_matrix.items():
        ranks = spectrum.energy_rank(energy, SHARE)
        channels = np.full(ranks.shape, K * H if name == SPECTRUM_JOINT else H)
        possible = _rank(energy) if name in OF_WEIGHTS else channels
        ranks_by_matrix[name] = np.stack([ranks, possible, channels], axis=-1)
    return ranks_by_matrix


def _rank(energies: np.ndarray) -> np.ndarray:
    """Returns [...] numerical ranks, given squared singular values [..., R]."""
    return (energies > _ROUNDING**2 * energies.max(axis=-1, keepdims=True)).sum(axis=-1)


def _drift(
    layer: Layer,
    rope: Rope,
    fixed: Mapping[str, Sequence[Subspaces | None]],
    counts: Sequence[int],
    arrays_by_name: Mapping[tuple[str, str], list],
) -> None:
    """Appends a layer's overlaps and errors of later logits to `arrays_by_name`."""
    _, length, _, H = layer.key_BTKH.shape
    r = key_drift.rank(H, length)
    for where, fixed_B in fixed.items():
        overlaps, errors = [], []
        for b, fixed_subspaces in enumerate(fixed_B):
            prefixes = key_drift.prefix_subspaces(layer, rope, b, where, counts, r)
            overlaps.append(key_drift.overlaps(prefixes))
            compared = [*prefixes.first, *prefixes.evenly_spaced, prefixes.whole, fixed_subspaces]
            errors.append(key_drift.later_errors(layer, rope, b, where, compared, r))
        arrays_by_name["overlap", where].append(np.stack(overlaps))
        arrays_by_name["drift", where].append(np.stack(errors))
