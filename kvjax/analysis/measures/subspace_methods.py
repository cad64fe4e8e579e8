"""Methods that choose a subspace of a head's keys, and the tokens that each may use."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import key_subspaces
from kvjax.analysis.measures.activations import Layer
from kvjax.analysis.measures.heads import Heads
from kvjax.analysis.measures.key_subspaces import Rope, Subspaces
from kvjax.attention.mechanism import MechanismConfig

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of a key's channels that are kept
FEW_SHARES = (1 / 4, 1 / 2)  # shares that the model runs with for `FEW_RUNS` and after RoPE
WINDOWS = 2  # measured rows per text
CALIBRATION = 4  # rows per text that fixed subspaces are computed on
WIDEST = 2048  # maximum of channels of all heads for a joint SVD

# How a subspace is chosen.
JOINT = "SVD of W_K, all heads"
WEIGHTS = "SVD of W_K, each head"
WEIGHTS_MEAN = "SVD of W_K, mean kept"
CALIBRATED = "fixed, from text"
OTHERS = "fixed, from other texts"
CONTEXT = "of this context"
FIRST_HALF = "of its first half"
NO_RUNS = (OTHERS, WEIGHTS_MEAN)  # methods that the whole model does not run with
FEW_RUNS = (FIRST_HALF,)
NAMES = (JOINT, WEIGHTS, WEIGHTS_MEAN, CALIBRATED, OTHERS, CONTEXT, FIRST_HALF)

# Where keys are cut.
BEFORE = "before RoPE"
AFTER = "after RoPE"
ANYWHERE = "as they are"  # in a model without RoPE

Method = tuple[str, str]  # how the subspace is chosen, where keys are cut


def places(*, rotates: bool) -> tuple[str, ...]:
    """Returns the places where keys can be cut; weights apply to the first."""
    return (BEFORE, AFTER) if rotates else (ANYWHERE,)


def rank(share: float, channels: int) -> int:
    """Returns the number of channels kept."""
    return max(1, int(share * channels + 0.5))


def shares(channels: int) -> tuple[float, ...]:
    """Returns the `SHARES` that give distinct ranks below the number of channels."""
    found = {}
    for share in sorted(SHARES, key=lambda share: -abs(share - rank(share, channels) / channels)):
        found[rank(share, channels)] = share  # the nearest of several shares
    return tuple(share for r, share in sorted(found.items()) if r < channels)


def is_run(way: Method, share: float) -> bool:
    """Returns True if the whole model runs with this method and share (each run costs a forward
    pass).
    """
    name, where = way
    few = name in FEW_RUNS or where == AFTER
    return name not in NO_RUNS and (share in FEW_SHARES or not few)


def enough_tokens(tokens: int, r: int) -> bool:
    """Returns True if this many tokens determine a subspace of rank r.

    t keys span t - 1 directions, and few queries hardly weight them. With 64 channels whose
    energies fall as 1/i, r = 16 and one query head, the subspace of 32 independent tokens has 1.8
    times the later logit error of 512 tokens, and 16 tokens 6 times.
    """
    return tokens >= 2 * r


def has_joint_svd(mechanisms: Sequence[MechanismConfig]) -> bool:
    """Returns True if there are several KV heads, and not too many for a joint SVD."""
    channels = max(one.key_heads * one.query_dim for one in mechanisms)
    return max(one.key_heads for one in mechanisms) > 1 and channels <= WIDEST


def rank_of(way: Method, share: float, heads: Heads) -> int:
    """Returns the channels kept of each KV head, or of all of them together."""
    _, K, H = heads.key_DKH.shape
    return rank(share, H) * (K if way[0] == JOINT else 1)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of T tokens of the texts.

    Attributes:
      measured_BT: [B, T + 1] first tokens of each text, a text's rows in order; a row's last token
        is only a target.
      texts_B, texts_C: the text of each row.
      fixed_CT: rows that fixed subspaces are computed on.
      later: True if they follow everything measured; else they are the measured rows, and a text's
        fixed subspaces come from the other texts.
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
        """Returns [B + C, T], all rows for the model."""
        return np.concatenate([self.measured_BT[:, :-1], self.fixed_CT])

    def pools(self, row: int) -> dict[str, tuple[int, ...]]:
        """Returns by method the rows of `rows` for a measured row's fixed subspaces."""
        after = np.arange(len(self.texts_C)) + len(self.texts_B)
        others = after[self.texts_C != self.texts_B[row]]
        found = {CALIBRATED: after, OTHERS: others} if self.later else {CALIBRATED: others}
        return {name: tuple(pool.tolist()) for name, pool in found.items() if pool.size}

    def enough_tokens(self, way: Method, r: int) -> bool:
        """Returns True if a method's tokens determine subspaces of this rank.

        The whole context passes by definition: directions that it lacks do not occur in it.
        """
        rows = [self.pools(row).get(way[0]) for row in range(len(self.texts_B))]
        tokens = [len(pool) * self.length for pool in rows if pool]
        if way[0] == FIRST_HALF:
            tokens = [self.length // 2]
        return all(enough_tokens(count, r) for count in tokens)


def windows(texts: Mapping[str, np.ndarray], length: int, longest: int) -> Windows:
    """Returns measured rows from the first `longest` tokens of each text, and evenly spaced later
    rows.

    If a text has no later tokens, the measured rows serve for both.
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
    heads: Heads, layer: Layer, read: Windows, *, rotates: bool, joint: bool
) -> dict[Method, list[Subspaces]]:
    """Returns by method the subspaces for each measured row.

    Args:
      layer: of `Windows.rows`.
      joint: see `has_joint_svd`.
    """
    B = len(read.texts_B)
    rope, bias_KH = key_subspaces.rope_of(heads), key_subspaces.bias(layer, heads)
    every, half = range(B), slice(read.length // 2)
    found, first = {}, places(rotates=rotates)[0]
    if joint:
        of_all = key_subspaces.of_weights(heads.key_DKH, bias_KH, together=True)
        found[JOINT, first] = [of_all] * B
    plain = key_subspaces.of_weights(heads.key_DKH, bias_KH)
    found[WEIGHTS, first] = [plain] * B
    for where in places(rotates=rotates):
        made = {}
        for b in every:
            for name, pool in read.pools(b).items():
                if pool not in made:
                    made[pool] = of_rows(layer, rope, where, pool)
                found.setdefault((name, where), []).append(made[pool])
        found[CONTEXT, where] = [of_rows(layer, rope, where, [b]) for b in every]
        found[FIRST_HALF, where] = [of_rows(layer, rope, where, [b], half) for b in every]
    if (CALIBRATED, first) in found:
        found[WEIGHTS_MEAN, first] = [
            plain._replace(center_JC=one.center_JC) for one in found[CALIBRATED, first]
        ]
    return found


def of_rows(
    layer: Layer,
    rope: Rope,
    where: str,
    rows: Sequence[int],
    tokens: slice | np.ndarray = slice(None),
) -> Subspaces:
    """Returns `key_subspaces.of_text` for some rows' keys and queries, at a slice or at positions.

    Before RoPE, queries are assumed as far from keys as these tokens, and independent of them.
    """

    def of(x_BTNH):
        return x_BTNH[list(rows)][:, tokens].astype(np.float64)

    if where != BEFORE:
        key_BTKH = of(layer.key_BTKH)
        moment_KHH = key_subspaces.moments(of(layer.query_BTNH), key_BTKH.shape[2])
        return key_subspaces.of_text(moment_KHH, key_BTKH, each_row=True)
    key_BTKH = of(layer.plain_key_BTKH)
    K, at_T = key_BTKH.shape[2], np.arange(layer.plain_key_BTKH.shape[1])[tokens]
    moment_KHH = key_subspaces.moments(of(layer.plain_query_BTNH), K)
    moment_KHH = key_subspaces.rotated_moments(moment_KHH, rope, layer.mask, at_T[-1] + 1 - at_T[0])
    return key_subspaces.of_text(moment_KHH, key_BTKH, each_row=False)


def cut_keys(layer: Layer, rope: Rope, row: int, where: str, of: Subspaces, r: int) -> np.ndarray:
    """Returns [T, K, H], a row's cut keys as attention uses them."""
    if where == BEFORE:
        return key_subspaces.rotate_by_position(
            of.cut(layer.plain_key_BTKH[row].astype(np.float64), r), rope
        )
    return of.cut(layer.key_BTKH[row].astype(np.float64), r)
