"""The choice of an implementation, and arguments that all implementations refuse."""

import numpy as np
import pytest

from kvjax.kernels.softmax_attention import api
from tests.kernels.softmax_attention import cases


def test_cpus_get_xla(monkeypatch):
    seen = []
    monkeypatch.setitem(api._IMPLEMENTATIONS, "xla", lambda *args: seen.append(1) or args[0])
    cases.trace(cases.shapes())
    cases.trace(cases.shapes(), mesh=cases.mesh(data=2))
    assert seen == [1, 1]


BAD = [
    (dict(implementation="flash"), "'flash': must be one of xla, splash, cudnn"),
    (dict(query_positions_T=np.arange(255)), r"must be int \[256\]"),
    (dict(key_positions_S=np.arange(256.0)), r"must be int \[256\]"),
    (dict(query_segment_ids_BT=np.zeros((2, 256), int)), "segment_ids_BS are needed"),
]


@pytest.mark.parametrize("options, message", BAD, ids=lambda x: str(x)[:20])
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        cases.trace(cases.shapes(), **options)


def test_shapes_that_do_not_fit():
    q, k, v = cases.shapes()
    wrong = (
        (cases.shapes(N=3)[0], k, v),
        (q, k, cases.shapes(K=4)[2]),
        (cases.shapes(H=64)[0], k, v),
    )
    for arrays in (*wrong, (q, *cases.shapes(B=4)[1:]), (cases.shapes(B=4)[0], k, v)):
        with pytest.raises(ValueError, match="do not fit"):
            cases.trace(arrays)
