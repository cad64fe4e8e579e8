"""Linear centred kernel alignment (CKA): similarity of two sets of features of the same tokens.

From "Similarity of neural network representations revisited" (Kornblith et al. 2019). CKA does not
change if channels are rotated, shifted, or scaled by a common factor.
"""

from collections.abc import Sequence

import numpy as np

_FEWEST = 4  # tokens, for the unbiased estimator
_NOTHING = 1e-24  # features with a smaller variance, over their energy, are constant up to rounding


def linear_cka(features: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [F, F] CKA of features [T, D], whose widths may differ; nan for constant features.

    Uses the unbiased estimate of HSIC (Song et al. 2012; for CKA: Nguyen et al. 2021), which leaves
    out the diagonals of Gram matrices. The biased estimate would give 0.5 for unrelated features
    with as many channels as tokens, and here there are often more channels than tokens. The
    unbiased estimate is 0 on average for unrelated features; a single value may be negative.

    Works on Gram matrices [T, T] if any D > T, else on products [D, D].
    """
    centred = [_centred(x_TD.astype(np.float64)) for x_TD in features]
    T = len(centred[0])
    if T < _FEWEST:
        raise ValueError(f"{T} tokens: at least {_FEWEST}")
    # Centred Gram matrices have rows of sum zero; without their diagonals d the sums are -d, and
    # tr(K L), 1'K 1, 1'K L 1 of the estimator follow from d and |X^T Y|².
    d_FT = np.stack([(x_TD**2).sum(axis=1) for x_TD in centred])
    hsic_FF = _products(centred) - T / (T - 2) * d_FT @ d_FT.T
    hsic_FF += np.outer(d_FT.sum(axis=1), d_FT.sum(axis=1)) / ((T - 1) * (T - 2))
    size_F = np.sqrt(np.where(np.diagonal(hsic_FF) > 0, np.diagonal(hsic_FF), np.nan))
    return hsic_FF / np.outer(size_F, size_F)


def _centred(x_TD: np.ndarray) -> np.ndarray:
    centred_TD = x_TD - x_TD.mean(axis=0)
    return centred_TD * ((centred_TD**2).sum() > _NOTHING * (x_TD**2).sum())


def _products(features: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [F, F] |X^T Y|², which equals the inner product of X X^T and Y Y^T."""
    T, F = len(features[0]), len(features)
    if max(x_TD.shape[1] for x_TD in features) > T:
        gram_FA = np.stack([(x_TD @ x_TD.T).ravel() for x_TD in features])
        return gram_FA @ gram_FA.T
    products_FF = np.zeros((F, F))
    for i in range(F):
        for j in range(i + 1):
            products_FF[i, j] = products_FF[j, i] = ((features[i].T @ features[j]) ** 2).sum()
    return products_FF
