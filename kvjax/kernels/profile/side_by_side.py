"""Compiles programs in parallel: compilers take most of a profile's time."""

from collections.abc import Callable, Hashable, Mapping
import concurrent.futures
import os

import jax

# A jitted function and its arguments, which may be abstract; None where nothing is compiled.
Program = tuple[jax.stages.Wrapped, tuple] | None
Load = Callable[[Hashable], jax.stages.Compiled | None]


def not_stored(key: Hashable) -> None:
    """Loads no program: all are compiled."""


def compiled[K: Hashable](
    programs: Mapping[K, Callable[[], Program]], load: Load = not_stored
) -> dict[K, Callable[[], jax.stages.Compiled | None]]:
    """Returns a function for each key that returns the compiled program, or raises its error.

    Programs are lowered one after another, in Python, and compiled by one thread per core; none is
    still compiling on return.

    Args:
      load: returns a program that was compiled before, by key, or None.
    """
    futures = {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        for key, make in programs.items():
            try:
                futures[key] = pool.submit(_compile_or_return(make, load(key)))
            except Exception as error:  # raised when this program is used
                futures[key] = concurrent.futures.Future()
                futures[key].set_exception(error)
        concurrent.futures.wait(futures.values())
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits only for running compilations
    return {key: future.result for key, future in futures.items()}


def _compile_or_return(
    make: Callable[[], Program], stored: jax.stages.Compiled | None
) -> Callable[[], jax.stages.Compiled | None]:
    program = make() if stored is None else None
    if program is None:
        return lambda: stored
    function, arguments = program
    return function.lower(*arguments).compile
