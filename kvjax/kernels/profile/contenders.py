"""Contenders of a profile: our implementations of decode attention, and libraries' attention.

Libraries support only MHA's and GQA's caches, in their own layouts. They attend to the whole cache,
without a mask.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import gc
import importlib.util
import itertools
import statistics
import sys

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.kernels.decode_attention.cache_layouts import GroupedInputs
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.profile import timing
from kvjax.kernels.profile.side_by_side import Program
from kvjax.kernels.profile.timing import Sample

LIBRARIES = ("cudnn", "torch", "torch_flash")
NAMES = (*IMPLEMENTATIONS, *LIBRARIES)
# Random tokens of a cache, which are repeated to its length: the random generator's temporaries are
# several times as large as its result.
_RANDOM_TOKENS = 1024
_FILLER_BYTES = 2**28  # read before each call of PyTorch, see `_by_events`


def default(platform: str) -> tuple[str, ...]:
    """Returns the default contenders; the first is our kernel for the platform."""
    ours = [name for name in (platform, "xla") if name in IMPLEMENTATIONS]
    return (*ours, *(LIBRARIES if platform == "gpu" else ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """One mechanism at one batch and length, called on a ring of full caches."""

    shape: Sizes
    batch: int
    length: int
    dtype: jnp.dtype
    copies: int  # caches of the ring
    passes: int  # passes through the ring in a round, see `timing.chain`

    @property
    def abstract(self) -> tuple:
        """Shapes and dtypes of the inputs, one cache and first_B."""
        sizes = dict(batch=self.batch, length=self.length, dtype=self.dtype)
        first_B = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return *shapes.abstract(self.shape, **sizes), first_B


class Problem:
    """A setup on the device: inputs, and a ring of full caches."""

    def __init__(self, setup: Setup):
        self.setup, length = setup, setup.length
        n = next(n for n in range(min(length, _RANDOM_TOKENS), 0, -1) if length % n == 0)
        sizes = dict(batch=setup.batch, length=n, dtype=setup.dtype)
        problems = [_problem(setup.shape, **sizes, seed=seed) for seed in range(setup.copies)]
        (self.inputs, *_), caches = zip(*problems, strict=True)
        self.caches = tuple(_repeated(cache, length // n) for cache in caches)
        self.first_B = jnp.full((setup.batch,), length - 1, jnp.int32)


# Compiled once for all lengths that are multiples of `_RANDOM_TOKENS`.
_problem = jax.jit(shapes.problem, static_argnums=0, static_argnames=("batch", "length", "dtype"))


@functools.partial(jax.jit, static_argnums=1)
def _repeated(cache: Mapping[str, jax.Array], times: int) -> Mapping[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.tile(x, times), cache)


def program(name: str, setup: Setup, **parameters: int) -> Program:
    """Returns a contender's chain of calls; None for PyTorch, which compiles nothing.

    Args:
      name: one of `NAMES`.
      parameters: tile sizes, for one of ours.

    Raises:
      NotImplementedError: the contender does not support the problem.
      ImportError: the contender is not installed, or has no GPU.
    """
    inputs, cache, first_B = setup.abstract
    if name in IMPLEMENTATIONS:
        call = functools.partial(IMPLEMENTATIONS[name], **parameters)
    elif not isinstance(inputs, GroupedInputs) or isinstance(setup.shape, shapes.Quantized):
        raise NotImplementedError(f"{name} reads MHA's and GQA's cache only, not quantised")
    elif name != "cudnn":
        return None
    elif jax.default_backend() != "gpu":
        raise ImportError("there is no GPU")
    else:
        call, cache = _cudnn, jax.eval_shape(_tokens_second, cache)
    chain = timing.chain(call, setup.passes)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    return chain, (rounds, inputs, [cache] * setup.copies, first_B)


def sample(name: str, problem: Problem, program: Callable | None, *, target: float) -> Sample:
    """Returns a sample of a contender's seconds per call; nothing is compiled when it is called.

    Args:
      name: one of `NAMES`.
      program: result of the function `program`, compiled.
      target: seconds by which the longer chain of calls is longer, see `timing.slope`.

    Raises:
      ImportError: the contender is not installed, or has no GPU.
    """
    if name in _TORCH:
        return _TORCH[name](problem, target)
    caches = problem.caches
    if copies_caches(name, problem.setup.shape):
        caches = tuple(jax.jit(_tokens_second)(cache) for cache in caches)

    def make(rounds: int):
        rounds = jnp.int32(rounds)
        return lambda: program(rounds, problem.inputs, list(caches), problem.first_B)

    return timing.slope(make, problem.setup.passes * len(caches), target=target)


def copies_caches(name: str, shape: Sizes) -> bool:
    """Returns True if a contender needs a second copy of the caches in JAX's memory."""
    return name == "cudnn" and isinstance(shape, GroupedSizes)


def free() -> None:
    """Frees arrays that tracebacks hold, and the memory that PyTorch's allocator caches."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _tokens_second(cache: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.moveaxis(x_BKHS, -1, 1) for name, x_BKHS in cache.items()}  # [B, S, K, H]


def _cudnn(inputs: GroupedInputs, cache: Mapping[str, jax.Array], first_B: jax.Array) -> jax.Array:
    del first_B
    return jax.nn.dot_product_attention(
        inputs.query,
        cache["base_key"],
        cache["base_value"],
        scale=inputs.scale,
        implementation="cudnn",
    )


def _torch(problem: Problem, target: float, *, flash: bool = False) -> Sample:
    """Returns a sample of PyTorch's scaled_dot_product_attention, which splits long caches itself.

    Args:
      flash: True for flash-attn's decoding kernel, whose arrays have tokens before heads.
    """
    torch = _torch_with_cuda()
    if flash and importlib.util.find_spec("flash_attn") is None:
        raise ImportError("flash-attn is not installed")
    shape, B, S = problem.setup.shape, problem.setup.batch, problem.setup.length

    def draw(heads: int, tokens: int, channels: int):
        dims = (B, tokens, heads, channels) if flash else (B, heads, tokens, channels)
        return torch.randn(*dims, dtype=torch.bfloat16, device="cuda")

    if flash:
        import flash_attn

        attend = flash_attn.flash_attn_with_kvcache
    else:
        grouped = {} if shape.K == shape.N else {"enable_gqa": True}  # older versions lack it
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **grouped)
    query = draw(shape.N, 1, shape.H)
    caches = [(draw(shape.K, S, shape.H), draw(shape.K, S, shape.Hv)) for _ in problem.caches]
    return _by_events(torch, functools.partial(attend, query), caches, target)


_TORCH = {"torch": _torch, "torch_flash": functools.partial(_torch, flash=True)}


def _torch_with_cuda():
    if importlib.util.find_spec("torch") is None:
        raise ImportError("PyTorch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this PyTorch sees no CUDA device")
    return torch


def _by_events(
    torch, attend: Callable, caches: Sequence[tuple[object, object]], target: float
) -> Sample:
    """Returns a sample: the median of the seconds between CUDA events around single calls.

    Before each call the device sums a large array, so that the host launches the call before the
    device can start it. The array is not written, since L2 would write dirty lines back during the
    call.
    """
    filler = torch.ones(_FILLER_BYTES // 4, device="cuda")
    ring = itertools.cycle(caches)

    def timed(calls: int) -> list[float]:
        events = []
        for _ in range(calls):
            cache = next(ring)
            filler.sum()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            attend(*cache)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    timed(len(caches))
    seconds = min(timed(3))
    calls = max(5, min(50, int(target / seconds)))
    return lambda: statistics.median(timed(calls))
