"""Computes outputs of the authors' attention modules with random weights, in float64.

`authors_code` starts it once per repository, in an environment with PyTorch, which need not have
kvjax. FlashAttention, which needs a GPU, is replaced by its definition. Every floating dtype that
the authors' code names is replaced by float64, so that differences are not hidden by rounding.
"""

import importlib
import itertools
import json
import pathlib
import sys
import types

import numpy as np
import torch

from experiments.benchmarks.authors import loading

BATCH, TOKENS, PREFILL = 2, 24, 5  # PREFILL: tokens that enter the authors' cache in one chunk
_REPLACED = ("transformers", "flash_attn", "flash_attn_interface", "hopper", "einops")
_REPLACED += ("clearml", "datasets", "rustbpe", "tiktoken")


def flash_attention(q, k, v, causal=True, qv=None, **_):
    """Computes FlashAttention 3's output [B, T, N, Hv]; the queries have the last T positions.

    Args:
      qv: queries whose products with values are added to the logits. The default scale also counts
        their channels (hopper/flash_attn_interface.py).
    """
    assert causal
    channels = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, k)
    if qv is not None:
        logits = logits + torch.einsum("btnh,bsnh->bnts", qv, v)
    T, S = logits.shape[-2:]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    logits = (logits * channels**-0.5).masked_fill(~mask, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", logits.softmax(-1), v)


def _flash_attention_with_cache(q, k_cache, v_cache, qv, **_):
    return flash_attention(q, k_cache, v_cache, qv=qv)


def _frequencies(config, device=None, **_):
    """Returns frequencies of transformers' RoPE of type "default"."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    return config.rope_theta**-exponents, 1.0


def _repeat(x, pattern: str, h: int):
    assert pattern == "b l 1 d -> b l h d", pattern
    return x.expand(-1, -1, h, -1)


_GIVEN = {
    "flash_attn_interface": {
        "flash_attn_func": flash_attention,
        "flash_attn_with_kvcache": _flash_attention_with_cache,
    },
    "hopper.flash_attn_interface": {  # returns the logarithm of the sum, too
        "flash_attn_func": lambda **options: (flash_attention(**options), None)
    },
    "transformers.modeling_rope_utils": {"ROPE_INIT_FUNCTIONS": {"default": _frequencies}},
    "einops": {"repeat": _repeat},
}


def widen() -> None:
    """Redefines every floating dtype as float64, and moves to a GPU as no-ops."""
    torch.set_default_dtype(torch.float64)
    for name in ("float32", "float", "float16", "half", "bfloat16"):
        setattr(torch, name, torch.float64)
    for name in ("float", "half", "bfloat16"):
        setattr(torch.Tensor, name, torch.Tensor.double)
    torch.Tensor.cuda = lambda self: self


def randomise(module: torch.nn.Module, fixed: dict[str, float], seed: int) -> dict:
    """Gives a module weights of which none is zero; returns them by name, float64.

    Matrices are N(0, 1/inputs); gains and biases lie in [0.5, 1.5].

    Args:
      fixed: constants for the parameters whose names have these endings.
    """
    rng, weights = np.random.default_rng(seed), {}
    for name, parameter in sorted(module.named_parameters()):
        shape = tuple(parameter.shape)
        # [out, in] of a Linear; [latents, in, out] of MLRA's own stacks of matrices.
        value = rng.standard_normal(shape) / np.sqrt(shape[1] if len(shape) > 1 else 1)
        if len(shape) == 1:
            value = rng.uniform(0.5, 1.5, shape)
        for ending, constant in fixed.items():
            if name.endswith(ending):
                value = np.full(shape, constant)
        parameter.data = torch.tensor(value)
        weights[name] = value
    return weights


# Each of these functions returns
# - a module,
# - a function (inputs, position of the first, cache) -> outputs; without a cache (None) the inputs
#   are whole rows,
# - a function that makes a cache; None if the module has no cache.


def _module(code, case, x):
    module = getattr(code, case["name"])(types.SimpleNamespace(**case["sizes"]))
    return module, lambda new, first, cache: module(new), None


def _generator(code, case, x):
    """Returns a module of MLRA for generation, which holds its own cache."""
    module = getattr(code, case["name"])(types.SimpleNamespace(**case["sizes"]))

    def run(new, first, cache):
        if first == 0:
            module.reset_cache()
            module._precompute_absorption()
        return module(new)

    return module, run, object


def _llama(code, case, x):
    """Returns a module for transformers' Llama; its RoPE has another number of channels."""
    config = types.SimpleNamespace(**case["sizes"])
    module = getattr(code, case["name"])(config, layer_idx=0)
    of_rope = types.SimpleNamespace(**case["sizes"] | {"head_dim": case["rope_dim"]})
    rotary = code.LlamaRotaryEmbedding(config=of_rope)

    def run(new, first, cache):
        angles = rotary(new, torch.arange(first, first + new.shape[1])[None])
        return module(new, position_embeddings=angles, past_key_value=cache)[0]

    return module, run, _Cache


class _Cache:
    """A cache that concatenates along the axis before the last, as transformers' DynamicCache."""

    arrays = ()

    def update(self, keys, values, layer, options):
        new = (keys, values)
        if self.arrays:
            new = [torch.cat(pair, dim=-2) for pair in zip(self.arrays, new, strict=True)]
        self.arrays = new
        return new


def _nanochat(code, case, x):
    config = types.SimpleNamespace(**case["sizes"])
    module = getattr(code, case["name"])(config, 0)
    dim = config.n_embd // config.n_head
    cos, sin = code.GPT._precompute_rotary_embeddings(None, TOKENS, dim, device="cpu")
    engine = importlib.import_module("nanochat.engine")

    def run(new, first, cache):
        angles = tuple(a[:, first : first + new.shape[1]] for a in (cos, sin))
        return module(new, angles, cache)

    return module, run, lambda: engine.KVCache(BATCH, config.n_kv_head, TOKENS, dim, 1)


def _tpa_decoding(code, case, x):
    """Returns TPA's module T6 of rank 1; with a cache its factors go to the kernel in `decode/`."""
    module = getattr(code, case["name"])(types.SimpleNamespace(**case["sizes"]))
    decoding = loading.load(pathlib.Path(case["folder"], "decode/flashtpa_decode_torch.py"))
    N, R, H = (case["sizes"][key] for key in ("n_head", "q_rank", "head_dim"))

    def run(new, first, cache):
        if cache is None:
            return module(new)

        def factor(name, *axes):
            return getattr(module.c_qkv, name)(x).view(BATCH, TOKENS, *axes)

        angles = module.c_qkv.rotary(x)
        bq = code.apply_rotary_emb(factor("W_B_q", R, H), *angles)
        bk = code.apply_rotary_emb(factor("W_B_k", 1, H), *angles)[:, :, 0]
        aq, ak = factor("W_A_q", N, R), factor("W_A_k", N)
        av, bv = factor("W_A_v", N), factor("W_B_v", H)
        outputs = []
        for t in range(first, first + new.shape[1]):
            now, past = slice(t, t + 1), slice(0, t + 1)
            factors = (aq[:, now], ak[:, past], av[:, past], bq[:, now], bk[:, past], bv[:, past])
            outputs.append(decoding.flashtpa_decode_torch(*factors))
        return module.c_proj(torch.cat(outputs, dim=1).flatten(2))

    return module, run, object


def _transformers(code, case, x):
    family = case["family"]
    config = getattr(code, f"{family}Config")(**case["sizes"], attn_implementation="eager")
    module = getattr(code, case["name"])(config, layer_idx=0)
    rotary = getattr(code, f"{family}RotaryEmbedding")(config)
    index = torch.arange(TOKENS)
    distance = index[:, None] - index[None]
    seen = (distance >= 0) & (distance < (case["window"] or TOKENS))
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, -torch.inf)[None, None]

    def run(new, first, cache):
        stop = first + new.shape[1]
        positions = index[None, first:stop]
        options = dict(attention_mask=mask[:, :, first:stop, :stop], past_key_values=cache)
        if family == "DeepseekV4":  # angles by kind of layer
            options |= dict(position_ids=positions)
            angles = {"main": rotary(new, positions, layer_type="main")}
        else:
            angles = rotary(new, positions)
        return module(new, position_embeddings=angles, **options)[0]

    return module, run, code.DynamicCache


_CALLS = dict(module=_module, generator=_generator, llama=_llama, nanochat=_nanochat)
_CALLS |= dict(tpa_decoding=_tpa_decoding, transformers=_transformers)


def outputs(case: dict, code: types.ModuleType) -> dict[str, np.ndarray]:
    """Returns weights ("weights/NAME"), inputs x, and outputs y of whole rows.

    For a module with a cache, `cached` has the outputs from the cache: the first PREFILL tokens
    enter in one chunk, the others one by one. If this raises, `cached_error` has the message.
    """
    seed = case["seed"]
    x = torch.tensor(np.random.default_rng(seed).standard_normal((BATCH, TOKENS, case["width"])))
    with torch.no_grad():
        module, run, make_cache = _CALLS[case["call"]](code, case, x)
        weights = randomise(module.eval(), case["fixed"], seed)
        arrays = {f"weights/{name}": value for name, value in weights.items()}
        arrays |= dict(x=x.numpy(), y=run(x, 0, None).numpy())
        if make_cache is not None:
            try:
                cache, cuts = make_cache(), itertools.pairwise([0, *range(PREFILL, TOKENS + 1)])
                parts = [run(x[:, start:stop], start, cache) for start, stop in cuts]
                arrays["cached"] = torch.cat(parts, dim=1).numpy()
            except Exception as error:  # a bug of the authors, shown in the table
                arrays["cached_error"] = np.array(message_of(error))
    return arrays


def message_of(error: Exception) -> str:
    """Returns the type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _code(case: dict) -> types.ModuleType:
    """Returns the module with a case's class; for transformers also with its config and cache."""
    if case["call"] != "transformers":
        return loading.load(pathlib.Path(case["folder"], case["file"]))
    files = (case["file"], case["file"].replace("modeling", "configuration"))
    code = [vars(importlib.import_module(name)) for name in files]
    cache = {"DynamicCache": sys.modules["transformers"].DynamicCache}
    return types.SimpleNamespace(**code[0] | code[1] | cache)


def main(out: str) -> None:
    """Writes OUT/ID.npz for each case of a JSON list on standard input, and OUT/about.json."""
    cases = json.load(sys.stdin)
    finder = loading.Replaced(_REPLACED, _GIVEN)
    if cases[0]["call"] != "transformers":
        sys.meta_path.insert(0, finder)
        sys.path.insert(0, cases[0]["folder"])
    codes = [_code(case) for case in cases]
    widen()  # after the import of transformers, which makes tables of dtypes
    errors = {}
    for case, code in zip(cases, codes, strict=True):
        try:
            arrays = outputs(case, code)
        except Exception as error:  # a bug of the authors, shown in the table
            errors[case["id"]] = message_of(error)
        else:
            np.savez(pathlib.Path(out, f"{case['id']}.npz"), **arrays)
    modules = {name: sys.modules.get(name) for name in ("torch", "transformers")}
    versions = {n: m.__version__ for n, m in modules.items() if hasattr(m, "__version__")}
    tops = sorted({name.partition(".")[0] for name in finder.served})
    about = dict(versions=versions, replaced=tops, errors=errors)
    pathlib.Path(out, "about.json").write_text(json.dumps(about))
