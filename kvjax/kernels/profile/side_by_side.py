"""Compiles programs in parallel: compilers take most of a profile's time."""

from collections.abc import Callable, Hashable, Mapping
import concurrent.futures
import os

import jax


def compiled[K: Hashable](
    lower: Mapping[K, Callable[[], jax.stages.Lowered | None]],
) -> dict[K, Callable[[], jax.stages.Compiled | None]]:
    """Returns a function for each key that returns the compiled program, or raises its error.

    Programs are lowered one after another, in Python, and compiled by one thread per core; none is
    still compiling on return. A `lower` that returns None gives None.
    """
    futures = {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        for key, make in lower.items():
            try:
                lowered = make()
                futures[key] = pool.submit(lowered.compile if lowered else lambda: None)
            except Exception as error:  # raised when this program is used
                futures[key] = concurrent.futures.Future()
                futures[key].set_exception(error)
        concurrent.futures.wait(futures.values())
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits only for running compilations
    return {key: future.result for key, future in futures.items()}
