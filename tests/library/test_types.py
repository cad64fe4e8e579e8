"""Types of the public names, as a user's mypy sees them."""

import re
import subprocess
import sys

import pytest

import kvjax

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

# A call of each public function with one wrong argument, given by its name.
WRONG = """
kvjax.mha(num_heads="4")
kvjax.gqa(4, kv_heads="2")
kvjax.mqa(4, head_dim="2")
kvjax.lrkv(4, rank="2")
kvjax.grouped(4, kv_heads=4, bases="1", rank=2)
kvjax.thin_keys(4, key_dim="2")
kvjax.projection_sharing(4, tie=1)
kvjax.factored(4, kv_heads=4, latents="4", key_rank=2)
kvjax.mla(4, latent="8")
kvjax.mla_lrkv(4, latent=8, rank="2")
kvjax.mla_paper(4, latent="8")
kvjax.gla(4, latents="2", latent=8)
kvjax.mlra(4, branches="2", latent=8)
kvjax.gta(4, kv_heads="2")
kvjax.shared_kv(4, kv_heads="2")
kvjax.mfa(4, query_rank="2")
kvjax.mfa_kr(4, query_rank="2")
kvjax.tpa(4, key_rank="2", value_rank=2)
kvjax.Attention(kvjax.mha(4), d_model="64", rngs=nnx.Rngs(0))
attention(x_BTD="x")
attention.cache(1, capacity="128")
attention.prefill(x, cache="x")
attention.decode(x, cache, counts="x")
kvjax.KVCache.allocate(layout=1, batch=1, capacity=8)
kvjax.KVCache.allocate("grouped", batch=1, capacity=8, K="x")
cache.append(entry="x")
kvjax.decode_attention(x, cache.arrays, cache.lengths, layout=1)
kvjax.decode_attention(x, cache=cache, lengths=cache.lengths)
kvjax.decode_attention(x, cache.arrays, cache.lengths, expand_key="x")
kvjax.describe_layout(layout=1)
kvjax.load(source=1)
model.generate(prompts=1)
model.stream(prompt=["x"])
model.logits(tokens="x")
model.cache_bytes(tokens="1")
kvjax.train("lrkv_tiny", workdir=3)
kvjax.train("lrkv_tiny", "runs/x", trackers=[object()])
kvjax.convert_model("x", out=1)
kvjax.evaluate_model("x", tasks=1)
""".strip().splitlines()
NAMES = "x, model = jnp.zeros((1, 1, 64)), kvjax.load('x')\n"


def test_every_public_function_has_a_wrong_call():
    functions = {name for name in kvjax.__all__ if callable(getattr(kvjax, name))}
    called = {found[1] for line in WRONG if (found := re.match(r"kvjax\.(\w+)", line))}
    assert called == functions - {"Model", "Tracker", "UserError"}


@pytest.mark.slow
def test_wrong_arguments_are_found(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(PROGRAM + NAMES + "\n".join(WRONG))
    options = ["--follow-imports=silent", f"--cache-dir={tmp_path}", "--no-error-summary"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = dict(re.findall(r"user\.py:(\d+): (.*)", run.stdout)[::-1])
    first = (PROGRAM + NAMES).count("\n") + 1
    wrong = dict(enumerate(WRONG, first))
    assert {int(number) for number in lines} == {*SAID, *wrong}, run.stdout + run.stderr
    for number, said in SAID.items():
        assert lines[str(number)].startswith(said), lines[str(number)]
    for number, call in wrong.items():
        name = re.findall(r"(\w+)=", call)
        said = lines[str(number)]
        assert re.match(rf'error: (Argument "({"|".join(name)})" to|List item 0 has)', said), said
