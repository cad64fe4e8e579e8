"""Every config key with values that cannot be: one line that names the key, at once, or a run.

Each case goes through all that `train` checks before it touches its workdir. Where a value can be,
that is as far as it goes.
"""

import contextlib
import functools
import math
import pathlib
import re
import time

from etils import epath
import ml_collections
import pytest

from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.training import loop, preflight
from kvjax.workdir import identity
from tests import quick

# All keys of the first, of the others those of their mechanism.
NAMES = ("lrkv_tiny", "mla_tiny", "mla_paper_tiny", "thin_keys_tiny", "qk_tied_plus_tiny")
INTEGERS = (0, -1, 10**9, 10**12, 2**63)
HOSTILE = {
    bool: (0, None),
    int: INTEGERS,
    float: (math.nan, math.inf, -math.inf, 1e300, -1.0, 0.0, 1e-300, *INTEGERS),
    str: (
        *("", " ", "..", "../x", "a/b", "/", "é🙂", "\udcff", "~nobody/x", 7),
        *("gs://bucket/x", "s3://bucket/x", "hdfs://host/x", "a://"),
    ),
    tuple: ((0,), (-1,) * 4, (10**9,) * 4, (2**63,) * 4, (math.inf,) * 4, (1,) * 100_000, "1", 3),
}
CPU_SECONDS, BYTES = 20, 1 << 30


class Accepted(Exception):
    """Raised once every check has passed."""


def leaves(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def cases():
    for name in NAMES:
        for key, value in leaves(load_config(CONFIGS / f"{name}.py")):
            if name == NAMES[0] or key.startswith("attention."):
                # Every fifth: tests/fuzz tries the others, as options.
                values = HOSTILE[type(value)]
                for hostile in values if key == "name" else values[::5]:
                    shown = re.sub(r"[^\w.,-]+", "_", ascii(hostile))[:24]
                    yield pytest.param(name, key, hostile, id=f"{name}-{key}-{shown}")


def first_of_each_key():
    """Cases, marked slow except for the first value of each key."""
    every = list(cases())
    first = {case.values[:2]: case for case in reversed(every)}
    return quick.only(first.values(), every)


def changed(name, key, value):
    config = load_config(CONFIGS / f"{name}.py")
    config = ml_collections.ConfigDict(config.to_dict(), type_safe=False)
    *sections, last = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    section[last] = value
    return config


def resident(name):
    """Bytes of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


@pytest.fixture(scope="module", autouse=True)
def digested_once():
    """That all processes run the same code is asked of the same files each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_code_digest", functools.cache(preflight._code_digest))
        yield


@contextlib.contextmanager
def accepted(workdir):
    raise Accepted
    yield


@pytest.mark.parametrize("name, key, value", first_of_each_key())
def test_a_value_is_refused_by_its_key_or_can_be(name, key, value, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "exclusive", accepted)
    config = changed(name, key, value)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start, before = time.thread_time(), resident("VmRSS")
    try:
        with pytest.raises((UserError, Accepted)) as raised:
            loop.train(config, epath.Path(tmp_path / "run"))
    finally:
        grown = resident("VmHWM") - before
        assert time.thread_time() - start < CPU_SECONDS and grown < BYTES
    if raised.type is Accepted:
        return
    message = str(raised.value)
    assert f"config.{key}" in message and len(message) < 1000 + 2 * len(repr(value)), message
    assert "Bytes per device" not in message, message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workdir", ["s3://bucket/x", "hdfs://host/x", "FILE"])
def test_a_workdir_that_cannot_be(workdir, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "exclusive", accepted)
    (tmp_path / "file").write_text("")
    workdir = workdir.replace("FILE", f"{tmp_path}/file/run")
    with pytest.raises(UserError, match=f"^--workdir = '{workdir}': "):
        loop.train(load_config(CONFIGS / "lrkv_tiny.py"), workdir)
