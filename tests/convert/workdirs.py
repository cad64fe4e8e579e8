"""Workdirs of tiny models with random weights, as if they had been trained."""

import pathlib

from etils import epath
from flax import nnx, traverse_util
import jax
import numpy as np

from kvjax.attention import FactoredConfig, GroupedConfig, MLAConfig
from kvjax.convert import export as export_lib, into_workdir
from kvjax.data import tokenizer
from kvjax.foundation import command_line
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer
from tests.mechanisms import random_values

F32 = Compute()
LAYERS, VOCABULARY, CONTEXT = 3, 260, 40  # the tokenizer has 257 tokens
EPSILON = 1e-2  # large, so that a confused epsilon changes the logits
_DIMS = dict(num_heads=4, key_dim=8, value_dim=8, norm_epsilon=EPSILON)
_SIZES = dict(num_layers=LAYERS, d_model=24, mlp_dim=20, norm_epsilon=EPSILON)
BLOCKS = {
    "nanochat": BlockConfig(**_SIZES, rope_base=100.0, logit_softcap=2.0),
    "llama": BlockConfig(
        **_SIZES,
        norm_gain=True,
        activation="swiglu",
        embedding_norm=False,
        logit_softcap=0.0,
        rope_base=100.0,
        window=6,
    ),
    "granite": BlockConfig(
        **_SIZES,
        rope_base=100.0,
        embedding_scale=3.0,
        residual_scale=0.3,
        logit_divisor=2.5,
    ),
    "gpt2": BlockConfig(
        **_SIZES | dict(d_model=32),
        norm="layer",
        norm_gain=True,
        norm_bias=True,
        activation="gelu",
        positions="learned",
        max_positions=CONTEXT,
        bias=True,
        tied_head=True,
        embedding_norm=False,
        logit_softcap=0.0,
    ),
}


def grouped(K, J, R=0, **keys):
    return GroupedConfig(**_DIMS | keys, num_kv_heads=K, num_bases=J, rank=R)


def factored(K, J, key_rank, value_rank=0, **keys):
    ranks = dict(key_rank=key_rank, value_rank=value_rank)
    return FactoredConfig(**_DIMS | keys, num_kv_heads=K, num_latents=J, **ranks)


def mla(**keys):
    return MLAConfig(**_DIMS | keys, latent_dim=10, rope_key_dim=4)


PLAIN = dict(qk_norm="none")
# By name: a block, the mechanism of all layers or of each, and transformers' class for it.
MODELS = {
    "mha": ("nanochat", grouped(4, 4), "NanoChatForCausalLM"),
    "gqa": ("nanochat", grouped(2, 2), "NanoChatForCausalLM"),
    "mqa": ("nanochat", grouped(4, 1), "NanoChatForCausalLM"),
    "lrkv": ("nanochat", grouped(4, 1, 3), "NanoChatForCausalLM"),
    "lrkv_gqa": ("nanochat", grouped(4, 2, 3), "NanoChatForCausalLM"),
    "lrkv_by_layer": (
        "nanochat",
        [grouped(4, 2, 3), grouped(4, 2, 0), grouped(4, 2, 5)],
        "NanoChatForCausalLM",
    ),
    "lrkv_bias": ("nanochat", grouped(4, 1, 3, bias=True), "NanoChatForCausalLM"),
    "thin_keys": ("nanochat", factored(2, 2, 3), "NanoChatForCausalLM"),
    "thin_joint": ("nanochat", factored(2, 1, 5, 4), "NanoChatForCausalLM"),
    "mistral_lrkv": ("llama", grouped(2, 1, 3, **PLAIN), "MistralForCausalLM"),
    "qwen2_thin": (
        "llama",
        factored(2, 1, 5, **PLAIN, bias=True, out_bias=False),
        "Qwen2ForCausalLM",
    ),
    "qwen3_thin": ("llama", factored(2, 2, 3, qk_norm="rms_gain"), "Qwen3ForCausalLM"),
    "gpt2_lrkv": (
        "gpt2",
        grouped(4, 1, 3, **PLAIN, bias=True, latent_bias=True),
        "GPT2LMHeadModel",
    ),
}


class Made:
    """A model in memory: see `kvjax.convert.model.LazyModel`."""

    name = "made"
    context = CONTEXT
    chat_template = None

    def __init__(self, config: TransformerConfig, seed: int = 0):
        self.transformer, self.token_files = config, {}
        self.tokenizer_json = tokenizer.byte_tokenizer().to_json()
        state = nnx.state(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
        self.weights = traverse_util.flatten_dict(random_values(state, seed, np.float32))

    def parameters(self):
        return {path: (w.shape, w.dtype) for path, w in self.weights.items()}

    def read(self, path, layer=None):
        return self.weights[path] if layer is None else self.weights[path][layer]


def config(block: str | BlockConfig, mechanisms) -> TransformerConfig:
    """Returns a config from a name in BLOCKS and the mechanism of all layers or of each."""
    block = BLOCKS.get(block, block) if isinstance(block, str) else block
    if not isinstance(mechanisms, list):
        mechanisms = [mechanisms] * block.num_layers
    return TransformerConfig(block=block, mechanisms=tuple(mechanisms), vocab_size=VOCABULARY)


def write(folder: pathlib.Path, config: TransformerConfig, seed: int = 0) -> epath.Path:
    """Writes a workdir with a model of that config."""
    into_workdir.write(Made(config, seed), epath.Path(folder), dict(source="tests"))
    return epath.Path(folder)


def export(workdir: epath.PathLike, out: epath.PathLike, *options: str) -> None:
    """Runs the export command, which must succeed."""
    arguments = [f"--workdir={workdir}", f"--out={out}", *options]
    assert command_line.status(export_lib.main, arguments) == 0


def logits(model: Transformer, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns logits [B, T, V] in float32."""
    return np.asarray(_logits(model, tokens_BT))


@nnx.jit
def _logits(model, tokens_BT):
    return model.logits(model(tokens_BT, compute=F32), compute=F32)
