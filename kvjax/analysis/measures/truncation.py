"""Measures how logits of rank r change probabilities, outputs and perplexity.

The SVD of `logits.centred_logits` is truncated per text. It uses all L tokens, also those that a
query does not see: in causal models, too, logits are truncated before they are masked, because
masked logits have full rank and a cache need not store the mask. A soft cap is applied to the
truncated logits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.measures import activations, logits
from kvjax.analysis.measures.activations import Attend, Mask

_BATCH_ROWS = 128  # queries at a time, whose logits fit a core's cache


class TruncationErrors(NamedTuple):
    """Errors of truncating E, per head and rank.

    Attributes:
      mean_NR, worst_NR: mean and maximum over rows of |p - p_r|_1, which is at most 2.
      output_NR: |o - o_r| / |o|, Frobenius norms over a text's rows; 0 if outputs are zero.
    """

    mean_NR: np.ndarray
    worst_NR: np.ndarray
    output_NR: np.ndarray


def errors(
    svd: logits.CentredLogits,
    value_LKH: np.ndarray,
    ranks: Sequence[int],
    mask: Mask,
    softcap: float = 0.0,
) -> TruncationErrors:
    """Returns the errors of probabilities and outputs over the visible keys.

    Section 4.3 of logit spectra, and its first open question. Takes (2·R + 2·Hv)·L² FLOPs and L²
    exponentials per head and rank, half of that if causal. Heads run in parallel on the cores.
    """
    N, length, _ = svd.left_NLR.shape
    K, visible_LL = value_LKH.shape[1], mask.visible(length)

    def head_errors(head):
        value_LH = value_LKH[:, head * K // N].astype(np.float64)
        batches = []
        for first in range(0, length, _BATCH_ROWS):
            rows = slice(first, first + _BATCH_ROWS)
            keys = slice(first + _BATCH_ROWS if mask.causal else length)

            def attend(rank, rows=rows, keys=keys):
                z_TS = svd.truncated(head, rank, rows, keys)
                if softcap:
                    z_TS = activations.capped(z_TS + svd.mean_NL[head, rows, None], softcap)
                return activations.softmax(z_TS, visible_LL[rows, keys])

            batches.append(_row_errors(attend, value_LH[keys], ranks))
        change_RL, error_RL, size_L = (
            np.concatenate(x, axis=-1) for x in zip(*batches, strict=True)
        )
        size = np.sqrt(size_L.sum())
        output_R = np.sqrt(error_RL.sum(axis=1)) / size if size else np.zeros(len(ranks))
        return change_RL.mean(axis=1), change_RL.max(axis=1), output_R

    by_head = logits.parallel_map(head_errors, range(N))
    return TruncationErrors(*map(np.stack, zip(*by_head, strict=True)))


def _row_errors(
    attend: Callable[[int | None], np.ndarray], value_SH: np.ndarray, ranks: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns |p - p_r|_1 and |o - o_r|² of some rows for each rank, and |o|² of these rows."""
    p_TS = attend(None)
    changes, errors = [], []
    for rank in ranks:
        change_TS = attend(rank) - p_TS
        errors.append(((change_TS @ value_SH) ** 2).sum(axis=1))
        changes.append(np.abs(change_TS).sum(axis=1))
    return np.stack(changes), np.stack(errors), ((p_TS @ value_SH) ** 2).sum(axis=1)


def attention_of_rank(rank: int) -> Attend:
    """Returns softmax attention with logits of rank r in each head.

    With centred keys K_c and E's first r right singular vectors V_r, truncated logits are
    E_r = Q K_c^T V_r V_r^T. That is attention with queries Q (K_c^T V_r) and keys V_r of r
    channels. On CPU, LAPACK decomposes many small matrices: give BLAS one thread (`few_threads`).
    """

    def attend(q_BTNH, k_BTKH, v_BTKH, scale: float, mask: Mask, softcap: float) -> jax.Array:
        N, K = q_BTNH.shape[2], k_BTKH.shape[2]
        left_BNPH = jnp.linalg.qr(q_BTNH.swapaxes(1, 2), mode="r")
        key_BKTH = k_BTKH.swapaxes(1, 2)
        mean_BK1H = key_BKTH.mean(axis=2, keepdims=True)
        keys_BKTP, right_BKPH = jnp.linalg.qr(key_BKTH - mean_BK1H)

        def per_query_head(x_BKTH):
            return jnp.repeat(x_BKTH, N // K, axis=1)

        right_BNPH = per_query_head(right_BKPH)
        _, _, vectors_BNRP = jnp.linalg.svd(left_BNPH @ right_BNPH.swapaxes(2, 3))
        vectors_BNRP = vectors_BNRP[:, :, :rank]
        query_BTNR = jnp.einsum("BTNH,BNPH,BNRP->BTNR", q_BTNH, right_BNPH, vectors_BNRP)
        key_BTNR = jnp.einsum("BNTP,BNRP->BTNR", per_query_head(keys_BKTP), vectors_BNRP)
        if softcap:  # it depends on the rows' means, which one more channel adds
            mean_BTN1 = jnp.einsum("BTNH,BNSH->BTNS", q_BTNH, per_query_head(mean_BK1H))
            query_BTNR = jnp.concatenate([query_BTNR, mean_BTN1], axis=-1)
            key_BTNR = jnp.concatenate([key_BTNR, jnp.ones_like(mean_BTN1)], axis=-1)
        value_BTNH = jnp.repeat(v_BTKH, N // K, axis=2)
        return activations.plain(query_BTNR, key_BTNR, value_BTNH, scale, mask, softcap)

    return attend
