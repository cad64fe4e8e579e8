"""Chooses subspaces of a head's keys by several methods, each from the tokens that it may use."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import key_subspaces
from kvjax.analysis.measures.activations import Layer
from kvjax.analysis.measures.heads import Heads
from kvjax.analysis.measures.key_subspaces import Rope, Subspaces
from kvjax.attention.mechanism import MechanismConfig

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of a key's channels that are kept
FEW_SHARES = (1 / 4, 1 / 2)  # shares for which the model runs with `FEW_RUNS` and after RoPE
WINDOWS = 2  # rows per text that errors are measured on
CALIBRATION = 4  # rows per text that fixed subspaces are computed from
WIDEST = 2048  # a joint SVD of all KV heads has at most this many channels

# How a subspace is chosen.
JOINT = "SVD of W_K, all heads"
WEIGHTS = "SVD of W_K, each head"
WEIGHTS_MEAN = "SVD of W_K, mean kept"
CALIBRATED = "fixed, from text"
OTHERS = "fixed, from other texts"
CONTEXT = "of this context"
FIRST_HALF = "of its first half"
NO_RUNS = (OTHERS, WEIGHTS_MEAN)  # methods without a run of the whole model
FEW_RUNS = (FIRST_HALF,)  # methods with runs at `FEW_SHARES` only
NAMES = (JOINT, WEIGHTS, WEIGHTS_MEAN, CALIBRATED, OTHERS, CONTEXT, FIRST_HALF)

# Where keys are cut.
BEFORE = "before RoPE"
AFTER = "after RoPE"
ANYWHERE = "as they are"  # in a model without RoPE

Method = tuple[str, str]  # how the subspace is chosen, where keys are cut


def places(*, rotates: bool) -> tuple[str, ...]:
    """Returns the places where keys can be cut. Subspaces from weights are for the first one."""
    return (BEFORE, AFTER) if rotates else (ANYWHERE,)


def rank(share: float, channels: int) -> int:
    """Returns the number of channels that are kept, at least 1."""
    return max(1, int(share * channels + 0.5))


def shares(channels: int) -> tuple[float, ...]:
    """Returns the `SHARES` that give distinct ranks below the number of channels."""
    by_rank = {}
    for share in sorted(SHARES, key=lambda share: -abs(share - rank(share, channels) / channels)):
        by_rank[rank(share, channels)] = share  # the nearest of several shares
    return tuple(share for r, share in sorted(by_rank.items()) if r < channels)


def is_run(method: Method, share: float) -> bool:
    """Returns True if the whole model is run with a method and share, to measure perplexity."""
    name, where = method
    few = name in FEW_RUNS or where == AFTER
    return name not in NO_RUNS and (share in FEW_SHARES or not few)


def enough_tokens(tokens: int, r: int) -> bool:
    """Returns True if this many tokens determine a subspace of rank r.

    Centred keys of t tokens span t - 1 directions, and few queries hardly tell which of them
    matter. Example: 64 channels whose energies fall as 1/i, r = 16 and one query head. A subspace
    from 512 independent tokens gives the least error of later logits; from 32 tokens the error is
    1.8 times as large, from 16 tokens 6 times.
    """
    return tokens >= 2 * r


def has_joint_svd(mechanisms: Sequence[MechanismConfig]) -> bool:
    """Returns True if there are several KV heads, and not too many for a joint SVD."""
    channels = max(mechanism.key_heads * mechanism.query_dim for mechanism in mechanisms)
    return max(mechanism.key_heads for mechanism in mechanisms) > 1 and channels <= WIDEST


def rank_of(method: Method, share: float, heads: Heads) -> int:
    """Returns the number of channels kept per KV head, or for a joint SVD of all KV heads."""
    _, K, H = heads.key_DKH.shape
    return rank(share, H) * (K if method[0] == JOINT else 1)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of T tokens of the texts.

    Attributes:
      measured_BT: [B, T + 1] rows that errors are measured on, the first tokens of each text. A
        row's last token is only a target.
      texts_B: the text of each measured row, as an index.
      fixed_CT: [C, T] rows that fixed subspaces are computed from.
      texts_C: the text of each of these rows.
      later: True if the fixed rows follow all measured tokens. Else they are the measured rows, and
        a text's fixed subspaces come from the other texts.
    """

    measured_BT: np.ndarray
    texts_B: np.ndarray
    fixed_CT: np.ndarray
    texts_C: np.ndarray
    later: bool

    @property
    def length(self) -> int:
        return self.fixed_CT.shape[1]

    def rows(self) -> np.ndarray:
        """Returns [B + C, T] tokens, the measured rows and then the fixed rows."""
        return np.concatenate([self.measured_BT[:, :-1], self.fixed_CT])

    def pools(self, row: int) -> dict[str, tuple[int, ...]]:
        """Returns by method the indices in `rows()` that a row's fixed subspaces come from.

        Args:
          row: index of a measured row.
        """
        after = np.arange(len(self.texts_C)) + len(self.texts_B)
        others = after[self.texts_C != self.texts_B[row]]
        rows_by_method = {CALIBRATED: after, OTHERS: others} if self.later else {CALIBRATED: others}
        return {name: tuple(pool.tolist()) for name, pool in rows_by_method.items() if pool.size}

    def enough_tokens(self, method: Method, r: int) -> bool:
        """Returns True if a method's tokens determine subspaces of rank r.

        CONTEXT always does: the directions that its tokens lack do not occur in the measured row.
        """
        rows = [self.pools(row).get(method[0]) for row in range(len(self.texts_B))]
        tokens = [len(pool) * self.length for pool in rows if pool]
        if method[0] == FIRST_HALF:
            tokens = [self.length // 2]
        return all(enough_tokens(count, r) for count in tokens)


def windows(texts: Mapping[str, np.ndarray], length: int, longest: int) -> Windows:
    """Returns windows of up to `length` tokens of each text.

    Measured rows are taken from the first `longest` tokens of a text, fixed rows at even distances
    from the rest. If a text has no rest, the measured rows serve as fixed rows.
    """
    width = min(length + 1, *map(len, texts.values()))
    length = width - 1
    count = max(1, min(WINDOWS, longest // width))
    measured = [tokens_T[: count * width].reshape(count, width) for tokens_T in texts.values()]
    measured_BT = np.concatenate(measured)
    texts_B = np.repeat(np.arange(len(texts)), count)
    first = max(longest, count * width)
    rooms = [(len(tokens_T) - first) // length for tokens_T in texts.values()]
    if min(rooms) < 1:
        return Windows(measured_BT, texts_B, measured_BT[:, :-1], texts_B, later=False)
    fixed, texts_C = [], []
    for text, (tokens_T, room) in enumerate(zip(texts.values(), rooms, strict=True)):
        for i in sorted({j * room // CALIBRATION for j in range(CALIBRATION)}):
            fixed.append(tokens_T[first + i * length : first + (i + 1) * length])
            texts_C.append(text)
    return Windows(measured_BT, texts_B, np.stack(fixed), np.array(texts_C), later=True)


def of_layer(
    heads: Heads, layer: Layer, sampled: Windows, *, rotates: bool, joint: bool
) -> dict[Method, list[Subspaces]]:
    """Returns by method a subspace for each measured row.

    Args:
      layer: the layer's attention on `Windows.rows`.
      rotates: True if a layer of the model has RoPE.
      joint: True to include the joint SVD, see `has_joint_svd`.
    """
    B = len(sampled.texts_B)
    rope, bias_KH = key_subspaces.rope_of(heads), key_subspaces.bias(layer, heads)
    rows, half = range(B), slice(sampled.length // 2)
    subspaces, first = {}, places(rotates=rotates)[0]
    if joint:
        all_heads = key_subspaces.of_weights(heads.key_DKH, bias_KH, together=True)
        subspaces[JOINT, first] = [all_heads] * B
    plain = key_subspaces.of_weights(heads.key_DKH, bias_KH)
    subspaces[WEIGHTS, first] = [plain] * B
    for where in places(rotates=rotates):
        by_pool = {}
        for b in rows:
            for name, pool in sampled.pools(b).items():
                if pool not in by_pool:
                    by_pool[pool] = of_rows(layer, rope, where, pool)
                subspaces.setdefault((name, where), []).append(by_pool[pool])
        subspaces[CONTEXT, where] = [of_rows(layer, rope, where, [b]) for b in rows]
        subspaces[FIRST_HALF, where] = [of_rows(layer, rope, where, [b], half) for b in rows]
    if (CALIBRATED, first) in subspaces:
        subspaces[WEIGHTS_MEAN, first] = [
            plain._replace(center_JC=calibrated.center_JC)
            for calibrated in subspaces[CALIBRATED, first]
        ]
    return subspaces


def of_rows(
    layer: Layer,
    rope: Rope,
    where: str,
    rows: Sequence[int],
    tokens: slice | np.ndarray = slice(None),
) -> Subspaces:
    """Returns `key_subspaces.of_text` for the keys and queries of some rows and tokens.

    For keys before RoPE, queries are taken as independent of keys, at all distances between these
    tokens; see `key_subspaces.rotated_moments`.
    """

    def chosen(x_BTNH):
        return x_BTNH[list(rows)][:, tokens].astype(np.float64)

    if where != BEFORE:
        key_BTKH = chosen(layer.key_BTKH)
        moment_KHH = key_subspaces.moments(chosen(layer.query_BTNH), key_BTKH.shape[2])
        return key_subspaces.of_text(moment_KHH, key_BTKH, each_row=True)
    key_BTKH = chosen(layer.plain_key_BTKH)
    K, position_T = key_BTKH.shape[2], np.arange(layer.plain_key_BTKH.shape[1])[tokens]
    moment_KHH = key_subspaces.moments(chosen(layer.plain_query_BTNH), K)
    moment_KHH = key_subspaces.rotated_moments(
        moment_KHH, rope, layer.mask, position_T[-1] + 1 - position_T[0]
    )
    return key_subspaces.of_text(moment_KHH, key_BTKH, each_row=False)


def cut_keys(
    layer: Layer, rope: Rope, row: int, where: str, subspaces: Subspaces, r: int
) -> np.ndarray:
    """Returns a row's [T, K, H] keys, cut at rank r, as attention uses them."""
    if where == BEFORE:
        return key_subspaces.rotate_by_position(
            subspaces.cut(layer.plain_key_BTKH[row].astype(np.float64), r), rope
        )
    return subspaces.cut(layer.key_BTKH[row].astype(np.float64), r)
