"""What the profiler times side by side: our implementations, and libraries' attention.

A library's attention reads MHA's and GQA's cache only, in a layout of its own, and is given all of
it: no mask, no last position.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
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
from kvjax.kernels.decode_attention.readings import GroupedReading
from kvjax.kernels.decode_attention.readings.grouped import GroupedSizes
from kvjax.kernels.decode_attention.readings.reading import Sizes
from kvjax.kernels.profile import timing
from kvjax.kernels.profile.timing import Sample

LIBRARIES = ("cudnn", "torch", "torch_flash")
NAMES = (*IMPLEMENTATIONS, *LIBRARIES)
_DRAWN = 1024  # tokens drawn, then repeated: drawing takes several times its result's memory
_AHEAD_BYTES = 2**28


def default(platform: str) -> tuple[str, ...]:
    """What is compared where nothing is asked for; the first is our kernel for the platform."""
    ours = [name for name in (platform, "xla") if name in IMPLEMENTATIONS]
    return (*ours, *(LIBRARIES if platform == "gpu" else ()))


class Problem:
    """One mechanism at one batch and length on the device: operands, and a ring of full caches."""

    def __init__(self, shape: Sizes, *, batch: int, length: int, dtype: jnp.dtype, copies: int):
        self.shape, self.batch, self.length, self.dtype = shape, batch, length, dtype
        drawn = next(n for n in range(min(length, _DRAWN), 0, -1) if length % n == 0)
        sizes = dict(batch=batch, length=drawn, dtype=dtype)

        @jax.jit
        def draw(seed: int):
            operands, cache = shapes.problem(shape, **sizes, seed=seed)
            repeat = lambda array: jnp.tile(array, length // drawn)
            return operands, jax.tree.map(repeat, cache)

        (self.operands, *_), self.caches = zip(*(draw(seed) for seed in range(copies)), strict=True)
        self.first_B = jnp.full((batch,), length - 1, jnp.int32)


def sample(name: str, problem: Problem, *, target: float, **parameters: int) -> Sample:
    """Measures seconds per call of a contender; compiled and warm.

    Args:
      name: one of `NAMES`.
      target: seconds by which the longer chain of calls is longer, see `timing.slope`.
      parameters: block sizes, for one of ours.

    Raises:
      NotImplementedError: the contender does not take the problem.
      ImportError: it is not here.
    """
    if name in IMPLEMENTATIONS:
        call = functools.partial(IMPLEMENTATIONS[name], **parameters)
        return timing.chained(
            call, problem.operands, problem.caches, problem.first_B, target=target
        )
    if not isinstance(problem.operands, GroupedReading):
        raise NotImplementedError(f"{name} reads MHA's and GQA's cache only")
    return dict(cudnn=_cudnn, torch=_torch, torch_flash=_torch_flash)[name](problem, target)


def copies_caches(name: str, shape: Sizes) -> bool:
    """Whether a contender holds the caches once more in JAX's memory; PyTorch has its own."""
    return name == "cudnn" and isinstance(shape, GroupedSizes)


def free() -> None:
    """Frees arrays that errors' tracebacks hold, and what PyTorch keeps of freed memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _tokens_second(x_BKHS: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_BKHS, -1, 1)  # [B, S, K, H]


def _cudnn(problem: Problem, target: float) -> Sample:
    if jax.default_backend() != "gpu":
        raise ImportError("there is no GPU")
    moved = jax.jit(lambda cache: jax.tree.map(_tokens_second, cache))
    caches = tuple(moved(cache) for cache in problem.caches)

    def call(
        operands: GroupedReading, cache: Mapping[str, jax.Array], first_B: jax.Array
    ) -> jax.Array:
        del first_B
        return jax.nn.dot_product_attention(
            operands.query,
            cache["base_key"],
            cache["base_value"],
            scale=operands.scale,
            implementation="cudnn",
        )

    return timing.chained(call, problem.operands, caches, problem.first_B, target=target)


def _torch(problem: Problem, target: float) -> Sample:
    """PyTorch's scaled_dot_product_attention, which splits long caches by itself."""
    torch = _torch_with_cuda()
    shape, B, S = problem.shape, problem.batch, problem.length
    draw = lambda *dims: torch.randn(*dims, dtype=torch.bfloat16, device="cuda")
    query = draw(B, shape.N, 1, shape.H)
    cache = lambda: (draw(B, shape.K, S, shape.H), draw(B, shape.K, S, shape.Hv))
    caches = [cache() for _ in problem.caches]
    grouped = {} if shape.K == shape.N else dict(enable_gqa=True)  # which older ones lack
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **grouped)
    return _by_events(torch, functools.partial(attend, query), caches, target)


def _torch_flash(problem: Problem, target: float) -> Sample:
    """flash-attn's decoding kernel."""
    torch = _torch_with_cuda()
    if importlib.util.find_spec("flash_attn") is None:
        raise ImportError("flash-attn is not installed")
    import flash_attn

    shape, B, S = problem.shape, problem.batch, problem.length
    draw = lambda *dims: torch.randn(*dims, dtype=torch.bfloat16, device="cuda")
    query = draw(B, 1, shape.N, shape.H)
    cache = lambda: (draw(B, S, shape.K, shape.H), draw(B, S, shape.K, shape.Hv))
    caches = [cache() for _ in problem.caches]
    attend = functools.partial(flash_attn.flash_attn_with_kvcache, query)
    return _by_events(torch, attend, caches, target)


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
    """Between CUDA events around one call, round the ring of keys and values; median of several.

    Before each the device reads an array, so that the call is launched by the time it is reached;
    reads, since lines of L2 that were written would be written back while the call is timed.
    """
    ahead = torch.ones(_AHEAD_BYTES // 4, device="cuda")
    ring = itertools.cycle(caches)

    def timed(calls: int) -> list[float]:
        events = []
        for _ in range(calls):
            cache = next(ring)
            ahead.sum()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            attend(*cache)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    timed(len(caches))
    warm = min(timed(3))
    calls = max(5, min(50, int(target / warm)))
    return lambda: statistics.median(timed(calls))
