"""Measurements of keys cut at equal rank by several methods, on texts."""

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

SHARE = 0.9  # of the energy, for which components are counted

# Matrices whose spectra are measured.
SPECTRUM_WEIGHTS = "W_K of each head"
SPECTRUM_JOINT = "W_K of all heads together"
SPECTRUM_INTERACTION = "M = W_Q W_K^T of each head"
SPECTRUM_KEYS = "keys of each head on a text"
SPECTRUM_CENTRED = "the same less their mean"
SPECTRUM_LOGITS = "logits E of each head on a text"
OF_WEIGHTS = (SPECTRUM_WEIGHTS, SPECTRUM_JOINT, SPECTRUM_INTERACTION)
_ROUNDING = 1e-9  # share of the largest singular value below which values are rounding


@dataclasses.dataclass(frozen=True)
class CompressionMeasurements:
    """Numbers by method, over all layers' heads; rows are those of `Windows`.

    Attributes:
      key_dim: H of the widest heads, which `ranks` refer to.
      shares: of a key's channels that are kept.
      length: of rows, in tokens; errors and losses are of their second halves.
      texts_B: the text of each row.
      later: see `Windows`.
      errors: [B, heads, ranks, 2] of `key_subspaces.CutErrors`; nan if a method has too few tokens.
      nats: [B, tokens] by method and share; None: the unmodified model.
      spectra: by matrix [B or 1, heads, 3]: components for 90 % of the energy, the rank of weights
        (else channels), and channels.
      drift_at: numbers of tokens up to `drift_length`.
      overlap: by place [texts, KV heads, tokens, 2] with the subspace of all tokens: of first
        tokens, and of equally many spread ones.
      drift_error: by place [texts, heads, 2 tokens + 2], errors of later logits under the subspaces
        of first tokens, of spread ones, of all, and the fixed one (nan if there is none).
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
    """Measures all methods; subspaces come from the unmodified model.

    Args:
      length: of rows.
      longest: of rows for drift.

    Raises:
      UserError: activations or losses are not finite.
    """
    read = subspace_methods.windows(texts, length, longest)
    dims = [mechanism.query_dim for mechanism in model.transformer.mechanisms]
    kept, H = subspace_methods.shares(min(dims)), max(dims)
    found = collections.defaultdict(list)
    with progress.waiting("keys of low rank") as doing:
        ropes, fixed, nats = _by_method(model, read, kept, found, doing)
        doing.now("drift of subspaces")
        r = key_drift.rank(H, longest)
        at = key_drift.prefix_lengths(longest, r)
        longest_BT = np.stack([tokens_T[:longest] for tokens_T in texts.values()])
        for i, layer in enumerate(activations.layers(model, longest_BT)):
            doing.at(f"{i + 1} of {len(dims)} layers")
            _drift(layer, ropes[i], fixed[i], at, found)

    def named(name):
        return {
            key[1]: np.concatenate(arrays, axis=1)
            for key, arrays in found.items()
            if key[0] == name
        }

    return CompressionMeasurements(
        key_dim=H,
        shares=kept,
        ranks=tuple(subspace_methods.rank(share, H) for share in kept),
        length=read.length,
        texts_B=read.texts_B,
        later=read.later,
        errors=named("errors"),
        nats=nats,
        spectra=named("spectrum"),
        drift_rank=r,
        drift_length=longest,
        drift_at=at,
        overlap=named("overlap"),
        drift_error=named("drift"),
    )


def _by_method(
    model: LazyModel,
    read: subspace_methods.Windows,
    kept: Sequence[float],
    found: Mapping[tuple[str, Method | str], list],
    doing: progress.waiting,
) -> tuple[list[Rope], list[dict[str, list[Subspaces | None]]], dict]:
    """Measures errors and spectra of each layer into `found`.

    Returns:
      By layer RoPE, and by place the fixed subspaces of each text (or None); and the losses of each
      run.
    """
    joint = subspace_methods.has_joint_svd(model.transformer.mechanisms)
    rotates = model.transformer.block.angles_base is not None
    ropes, fixed, runs = [], [], None
    layers = zip(heads_lib.layers(model), activations.layers(model, read.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        doing.at(f"{i + 1} of {len(model.transformer.mechanisms)} layers")
        with few_threads(heads.key_DKH.shape[2]):
            ways = subspace_methods.of_layer(heads, layer, read, rotates=rotates, joint=joint)
            for name, numbers in _spectra(heads, layer, len(read.texts_B), joint).items():
                found["spectrum", name].append(numbers)
        for way, errors in _errors(heads, layer, ways, kept, read).items():
            found["errors", way].append(errors)
        cuts = {
            (way, share): Cut(of_rows, subspace_methods.rank_of(way, share, heads), way[1] == AFTER)
            for way, of_rows in ways.items()
            for share in kept
            if subspace_methods.is_run(way, share) and _has_tokens(read, way, share, heads)
        }
        runs = runs or Runs(model, read.measured_BT[:, :-1], [None, *cuts])
        runs.layer(i, cuts, heads.rotated)
        ropes.append(key_subspaces.rope_of(heads))
        fixed.append(_fixed(ways, read))
    doing.now("perplexity with keys of low rank")
    targets_BT = read.measured_BT[:, 1:][:, read.length // 2 :]
    nats = runs.losses(targets_BT)
    if not all(np.isfinite(nats_BT).all() for nats_BT in nats.values()):
        raise UserError(f"losses of {model.name} on the text are not finite: check its weights")
    return ropes, fixed, nats


def _has_tokens(read: subspace_methods.Windows, way: Method, share: float, heads: Heads) -> bool:
    """Returns True if a method has enough tokens for this share."""
    return read.enough_tokens(way, subspace_methods.rank(share, heads.key_DKH.shape[2]))


def _fixed(
    ways: Mapping[Method, Sequence[Subspaces]], read: subspace_methods.Windows
) -> dict[str, list[Subspaces | None]]:
    """Returns by place the fixed subspaces of each text, or None."""
    _, first = np.unique(read.texts_B, return_index=True)
    no = [None] * len(read.texts_B)
    return {
        where: [ways.get((CALIBRATED, where), no)[b] for b in first]
        for where in dict.fromkeys(where for _, where in ways)
    }


def _errors(
    heads: Heads,
    layer: Layer,
    ways: Mapping[Method, Sequence[Subspaces]],
    kept: Sequence[float],
    read: subspace_methods.Windows,
) -> dict[Method, np.ndarray]:
    """Returns by method [B, N, ranks, 2] errors of second-half queries; nan: see the class."""
    length, rope = layer.key_BTKH.shape[1], key_subspaces.rope_of(heads)
    queries, found = key_drift.later_queries(length), collections.defaultdict(list)
    for b in range(len(next(iter(ways.values())))):
        with few_threads(heads.key_DKH.shape[2]):
            cuts = [
                subspace_methods.cut_keys(
                    layer, rope, b, way[1], of_rows[b], subspace_methods.rank_of(way, share, heads)
                )
                for way, of_rows in ways.items()
                for share in kept
            ]
        errors_NA2 = np.stack(key_subspaces.errors(layer, b, cuts, queries), axis=-1)
        for way, of_way in zip(ways, np.split(errors_NA2, len(ways), axis=1), strict=True):
            enough = np.array([_has_tokens(read, way, share, heads) for share in kept])
            found[way].append(np.where(enough[:, None], of_way, np.nan))
    return {way: np.stack(arrays) for way, arrays in found.items()}


def _spectra(heads: Heads, layer: Layer, B: int, joint: bool) -> dict[str, np.ndarray]:
    """Returns by matrix [B or 1, heads, 3]: see `CompressionMeasurements`."""
    D, K, H = heads.key_DKH.shape

    def energies(x_LH):
        return np.linalg.svd(np.linalg.qr(x_LH, mode="r"), compute_uv=False) ** 2

    found = {SPECTRUM_WEIGHTS: energies(heads.key_DKH.swapaxes(0, 1))[None]}
    if joint:
        found[SPECTRUM_JOINT] = energies(heads.key_DKH.reshape(1, 1, D, K * H))
    found[SPECTRUM_INTERACTION] = logits.Interaction(heads).energies()[None]
    key_BKTH = layer.plain_key_BTKH[:B].astype(np.float64).swapaxes(1, 2)
    found[SPECTRUM_KEYS] = energies(key_BKTH)
    found[SPECTRUM_CENTRED] = energies(key_BKTH - key_BKTH.mean(axis=2, keepdims=True))
    of = zip(layer.query_BTNH[:B], layer.key_BTKH, strict=False)
    found[SPECTRUM_LOGITS] = np.stack(
        [logits.centred_logits(query, key, layer.scale).energies_NR for query, key in of]
    )
    made = {}
    for name, energy in found.items():
        ranks = spectrum.energy_rank(energy, SHARE)
        channels = np.full(ranks.shape, K * H if name == SPECTRUM_JOINT else H)
        possible = _rank(energy) if name in OF_WEIGHTS else channels
        made[name] = np.stack([ranks, possible, channels], axis=-1)
    return made


def _rank(energies: np.ndarray) -> np.ndarray:
    """Returns [...] numerical ranks in float64."""
    return (energies > _ROUNDING**2 * energies.max(axis=-1, keepdims=True)).sum(axis=-1)


def _drift(
    layer: Layer,
    rope: Rope,
    fixed: Mapping[str, Sequence[Subspaces | None]],
    at: Sequence[int],
    found: Mapping[tuple[str, str], list],
) -> None:
    """Measures a layer's overlaps and later errors into `found`."""
    _, length, _, H = layer.key_BTKH.shape
    r = key_drift.rank(H, length)
    for where, ends in fixed.items():
        overlaps, errors = [], []
        for b, end in enumerate(ends):
            grown = key_drift.prefix_subspaces(layer, rope, b, where, at, r)
            overlaps.append(key_drift.overlaps(grown))
            of = [*grown.first, *grown.evenly_spaced, grown.whole, end]
            errors.append(key_drift.later_errors(layer, rope, b, where, of, r))
        found["overlap", where].append(np.stack(overlaps))
        found["drift", where].append(np.stack(errors))
