"""Types of the public names, as a user's mypy sees them."""

import re
import subprocess
import sys

import pytest

PROGRAM = """from flax import nnx
import jax.numpy as jnp
import kvjax

attention = kvjax.Attention(kvjax.lrkv(num_heads=4, rank=8), 64, rngs=nnx.Rngs(0))
cache = attention.cache(1, 128)
reveal_type(attention.decode(jnp.zeros((1, 1, 64)), cache))
reveal_type(kvjax.load("runs/x").generate(["a"]))
kvjax.lrkv(num_heads=4, rnak=8)
kvjax.mla(num_heads="4", latent=8)
kvjax.KVCache.allocate("grouped", batch="1", capacity=8)
kvjax.train("lrkv_tiny", workdir=3)
kvjax.no_such_name
"""
SAID = {
    7: 'note: Revealed type is "tuple[jax._src.basearray.Array, kvjax.library.kv_cache.KVCache]"',
    8: 'note: Revealed type is "list[str]"',
    9: 'error: Unexpected keyword argument "rnak" for "lrkv"',
    10: 'error: Argument "num_heads" to "mla" has incompatible type "str"; expected "int"',
    11: 'error: Argument "batch" to "allocate" of "KVCache" has incompatible type "str"',
    12: 'error: Argument "workdir" to "train" has incompatible type "int"',
    13: 'error: Module has no attribute "no_such_name"',
}


@pytest.mark.slow
def test_wrong_arguments_are_found(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(PROGRAM)
    options = ["--follow-imports=silent", f"--cache-dir={tmp_path}", "--no-error-summary"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = dict(re.findall(r"user\.py:(\d+): (.*)", run.stdout)[::-1])
    assert {int(number) for number in lines} == SAID.keys(), run.stdout + run.stderr
    for number, said in SAID.items():
        assert lines[str(number)].startswith(said), lines[str(number)]
