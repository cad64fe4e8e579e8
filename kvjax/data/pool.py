"""Worker processes that tokenize the parts of a corpus on one machine."""

from collections.abc import Callable, Iterable
import concurrent.futures
from concurrent.futures.process import BrokenProcessPool
import multiprocessing
import os
import signal
import threading

from kvjax.data import config as config_lib, tokenized_part, tokenizer as tokenizer_lib
from kvjax.data.partial_dataset import PartialDataset
from kvjax.data.parts import Part
from kvjax.foundation.errors import UserError


def make(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    parts: Iterable[Part],
    partial: PartialDataset,
    *,
    workers: int,
    skip_broken: bool,
    made: Callable[[Part], None],
) -> None:
    """Writes parts into a partial data set, in this process or in worker processes.

    Args:
      workers: number of processes; 1: only this process.
      skip_broken: skip records that cannot be read.
      made: called with each finished part.

    Raises:
      DataError: a source cannot be read; finished parts stay.
      UserError: a worker was killed.
    """
    parts = list(parts)
    workers = min(workers, len(parts))
    if workers <= 1:
        for part in parts:
            make_part(config, part, tokenizer, partial, skip_broken=skip_broken)
            made(part)
        return
    earlier_children = multiprocessing.active_children()
    executor = concurrent.futures.ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # the caller has threads
        initializer=_start,
        initargs=(config, tokenizer.to_json(), partial, skip_broken),
    )
    try:
        futures = {executor.submit(_make_in_worker, part): part for part in parts}
        for future in concurrent.futures.as_completed(futures):
            future.result()
            made(futures[future])
    except BrokenProcessPool as error:
        raise UserError(
            "a worker of the preparation was killed (out of memory?), or could not start (a script "
            "that prepares data needs `if __name__ == '__main__':`). Finished parts stay: run the "
            "same command again, with fewer --workers if memory was short"
        ) from error
    except BaseException:  # do not wait for parts that are still being made
        for child in multiprocessing.active_children():
            if child not in earlier_children:
                child.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_arguments: tuple = ()


def _start(config, tokenizer_json: str, partial: PartialDataset, skip_broken: bool) -> None:
    """Initialises a worker process."""
    global _arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent kills its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = tokenizer_lib.from_json(tokenizer_json, config.tokenizer, threads=1)
    _arguments = config, tokenizer, partial, skip_broken


def _end_with_parent() -> None:
    """Ends this worker when its parent is gone, since a killed parent cannot end it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _make_in_worker(part: Part) -> None:
    config, tokenizer, partial, skip_broken = _arguments
    make_part(config, part, tokenizer, partial, skip_broken=skip_broken)


def make_part(config, part: Part, tokenizer, partial: PartialDataset, *, skip_broken: bool) -> None:
    """Makes one part in this process."""
    with partial.work() as folder:
        count, skip = partial.num_parts, skip_broken
        result = tokenized_part.write(config, part, count, tokenizer, folder, skip_broken=skip)
        partial.publish(part.index, folder, result)
