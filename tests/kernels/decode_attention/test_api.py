"""The default implementation, and the log of falling back to XLA."""

import jax.numpy as jnp
import pytest

from kvjax.foundation import logs
from kvjax.kernels.decode_attention import api, shapes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes


@pytest.fixture(autouse=True)
def nothing_logged_yet():
    logs.log_once.cache_clear()


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_a_kernel_that_refuses_says_why_once(monkeypatch, caplog, kernel):
    monkeypatch.setattr(api, "kernels_of", lambda device: kernel)
    narrow = GroupedSizes(N=4, K=2, H=6, Hv=6)  # which no kernel's tiles hold
    problem = shapes.abstract(narrow, batch=1, length=256, dtype=jnp.bfloat16)
    assert api.default(*problem) == api.default(*problem) == "xla"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "use 'xla'" in record.getMessage()
    assert record.getMessage().startswith(f"decode attention: the {kernel.upper()} kernel")


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_a_kernel_that_takes_it_is_the_default(monkeypatch, caplog, kernel):
    monkeypatch.setattr(api, "kernels_of", lambda device: kernel)
    wide = shapes.SHAPES["d12"]["lrkv"]
    problem = shapes.abstract(wide, batch=1, length=4096, dtype=jnp.bfloat16)
    assert api.default(*problem) == kernel and not caplog.records
    monkeypatch.setattr(api, "kernels_of", lambda device: None)
    assert api.default(*problem) == "xla" and not caplog.records
