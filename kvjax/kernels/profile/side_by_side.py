"""Compiles many programs side by side: most of a profile's time goes into compilers."""

from collections.abc import Callable, Hashable, Mapping
import concurrent.futures
import os

import jax


def compiled[K: Hashable](
    lower: Mapping[K, Callable[[], jax.stages.Lowered | None]],
) -> dict[K, Callable[[], jax.stages.Compiled | None]]:
    """A function for each that gives the program, or raises what kept it from being one.

    They are lowered one after another, which Python does, and compiled by a thread for each core.
    All are done when this returns. None stays None.
    """
    futures = {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        for key, make in lower.items():
            try:
                lowered = make()
                futures[key] = pool.submit(lowered.compile if lowered else lambda: None)
            except Exception as error:  # one that fails does not end the run
                futures[key] = concurrent.futures.Future()
                futures[key].set_exception(error)
        concurrent.futures.wait(futures.values())
    finally:
        pool.shutdown(cancel_futures=True)  # who interrupts waits for what is under way only
    return {key: future.result for key, future in futures.items()}
