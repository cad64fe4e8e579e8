"""A new mechanism with a new cache layout, all in this file, works everywhere.

Keys and values are sums of R outer products, k_n = sum_r a_rn b_r and v_n = sum_r c_rn d_r; RoPE
rotates b. The first axis of its cache counts ranks, not heads, and no kernel implements it.
"""

import dataclasses
import json

from etils import epath
import jax
import jax.numpy as jnp
import pytest

from kvjax import attention, config as config_lib
from kvjax.analysis import __main__ as analysis
from kvjax.attention.mechanism import Mechanism, MechanismConfig, check_common, normalise_and_rotate
from kvjax.cache.field import Field
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.distributed import sharding
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    static,
)
from kvjax.layers.weight import linear, weight
from kvjax.model import parameters
from kvjax.training import loop
from kvjax.workdir.trained import load
from tests import quick, runs
from tests.attention import law

# -- the mechanism ---------------------------------------------------------------------------------


@pytree
class OuterProductInputs(DecodeInputs):
    """cache: key_head, value_head [B, R, N, S], key_factor [B, R, H, S], value_factor likewise."""

    query: jax.Array  # [B, T, N, H]
    scale: float = static()

    def expand(self, cache):
        def product(name):
            return jnp.einsum("BSRN,BSRH->BSNH", cache[f"{name}_head"], cache[f"{name}_factor"])

        return self.query, product("key"), product("value")

    def tiles(self):
        return _Tiles(self)


class _Tiles(Tiles):
    large_logits = True  # the products of all ranks are as large as a tile

    def __init__(self, inputs):
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def widths(self, cache):
        return (cache["value_factor"].shape[2],)

    def logits(self, tile, start):
        inner = jnp.einsum("BNTH,BRHs->BNTRs", self.q_BNTH, tile["key_factor"])
        return jnp.einsum("BNTRs,BRNs->BNTs", inner, tile["key_head"])

    def weighted_sums(self, p_BNTs, tile):
        weights = jnp.einsum("BNTs,BRNs->BNTRs", p_BNTs, tile["value_head"])
        return (jnp.einsum("BNTRs,BRVs->BNTV", weights, tile["value_factor"]),)

    def finish(self, outputs):
        return outputs[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterProductConfig(MechanismConfig):
    rank: int  # of keys and values, R
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "none"  # nothing is normed here

    def __post_init__(self):
        check_common(self, "rank", "value_dim")

    def entry(self):
        R, N = self.rank, self.num_heads
        return {
            "key_head": Field("R N", (R, N)),
            "key_factor": Field("R H", (R, self.key_dim)),
            "value_head": Field("R N", (R, N)),
            "value_factor": Field("R H", (R, self.value_dim)),
        }

    def decode_flops(self, rope_base):
        return DecodeFlops(0, 2 * self.num_heads * self.rank * (self.key_dim + self.value_dim + 2))

    def build(self, d_model, *, rngs):
        return OuterProduct(self, d_model, rngs=rngs)


class OuterProduct(Mechanism):
    def __init__(self, config, d_model, *, rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, R=c.rank, H=c.key_dim)
        self.query = weight("D -> N H", rngs, **sizes)
        self.key_head = weight("D -> R N", rngs, **sizes)
        self.key_factor = weight("D -> R H", rngs, **sizes)
        self.value_head = weight("D -> R N", rngs, **sizes)
        self.value_factor = weight("D -> R H", rngs, **sizes | dict(H=c.value_dim))

    def project(self, x_BTD, positions):
        q_BTNH = linear(x_BTD, self.query[...])
        q_BTNH = normalise_and_rotate(q_BTNH, None, positions.rotary)
        return q_BTNH, {n: linear(x_BTD, getattr(self, n)[...]) for n in self.config.entry()}

    def keys_values(self, raw, positions):
        cached = self.encode(raw, positions)

        def product(name):
            return jnp.einsum("BTRN,BTRH->BTNH", cached[f"{name}_head"], cached[f"{name}_factor"])

        return product("key"), product("value")

    def encode(self, raw, positions):
        factor = normalise_and_rotate(raw["key_factor"], None, positions.rotary)
        return raw | dict(key_factor=factor)

    def decode_inputs(self, q_BTNH, rope_base):
        return OuterProductInputs(query=q_BTNH, scale=self.config.scale)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Adds the mechanism to `attention.MECHANISMS`."""
    monkeypatch.setitem(attention.MECHANISMS, "outer_product", OuterProductConfig)


# -- its uses --------------------------------------------------------------------------------------

N, R, H = 4, 3, 8


def run_config(tmp_path, **mesh):
    config = runs.small_config(runs.write_text(tmp_path / "text.txt"), str(tmp_path / "data"))
    attention = dict(kind="outer_product", num_heads=N, rank=R, key_dim=H, value_dim=H)
    with config.unlocked():
        config.attention = attention
    config.data.update(tokenizer="bpe", vocab_size=320)  # divisible by two devices
    config.mesh.update(mesh)
    config.train.update(num_steps=4, eval_every=4, checkpoint_every=4)
    return config


@pytest.mark.parametrize("base", quick.only([law.BASE], [None, law.BASE]))
def test_it_obeys_the_law(x64, randomise, base):
    law.check(randomise, OuterProductConfig(num_heads=N, rank=R, key_dim=H, value_dim=6), base)


@pytest.mark.slow
def test_it_trains_shards_generates_and_is_analysed(tmp_path, monkeypatch):
    mesh = dict(fsdp=2, sequence=2, tensor=2)
    eight = loop.train(run_config(tmp_path, **mesh), epath.Path(tmp_path / "eight"))
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
    one = loop.train(run_config(tmp_path), epath.Path(tmp_path / "one"))
    assert eight["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
    loaded = load(epath.Path(tmp_path / "eight"))
    generation = Generator(loaded.model, loaded.compute).start([[1, 2, 3]], num_tokens=5)
    assert len(list(generation)) == 5
    page = tmp_path / "page"
    texts = f"--texts=text={tmp_path / 'text.txt'}"
    analysis.main([f"--workdir={tmp_path / 'one'}", texts, "--lengths=16", f"--out={page}"])
    reports = json.loads((page / "report.json").read_text("utf-8"))["reports"]
    assert list(reports) == ["behaviour"]  # others need keys that are linear in the input


def test_it_has_a_title():
    config = OuterProductConfig(num_heads=N, rank=R, key_dim=H, value_dim=6)
    assert config.title == "OuterProduct, 4 heads"


def test_its_costs_and_sharding_follow(tmp_path):
    model = config_lib.resolve(run_config(tmp_path)).model
    elements = 2 * R * (N + H)
    assert formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)) == 2 * 2 * elements
    cost = formulas.decode_cost(model, length=10, batch=1, dtype=jnp.dtype(jnp.bfloat16))
    assert cost.attention_flops_per_token == 2 * 10 * 2 * N * R * (2 * H + 2)
    # With two chips by heads, each has half of the heads' factors, and all of the channels'.
    halved = formulas.chip_cache_bytes(model, jnp.dtype(jnp.bfloat16), chips=2, by="heads")
    assert halved == 2 * 2 * 2 * R * (N / 2 + H)
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 2), sharding.AXES)
    shardings = sharding.parameter_shardings(mesh, *parameters.abstract(model))
    split = shardings["segments"][0]["attention"]["mechanism"]
    assert split["key_head"].spec == jax.sharding.PartitionSpec(None, "fsdp", None, "tensor")
    assert split["key_factor"].spec == jax.sharding.PartitionSpec(None, "fsdp", None, None)
