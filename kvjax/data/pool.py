"""Processes that tokenize the parts of a corpus side by side on one machine."""

from collections.abc import Callable, Iterable
import concurrent.futures
from concurrent.futures.process import BrokenProcessPool
import multiprocessing
import os
import signal
import threading

from kvjax.data import config as config_lib, readers, tokenized_part, tokenizer as tokenizer_lib
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
    """Writes parts into the folder under way, in this process or in several others.

    Args:
      workers: processes; 1: this one.
      skip_broken: leave out what cannot be read.
      made: called with each part when it is done.

    Raises:
      DataError: a source that cannot be read; what was made stays.
      UserError: a worker that was killed.
    """
    parts = list(parts)
    workers = min(workers, len(parts))
    if workers <= 1:
        for part in parts:
            make_part(config, part, tokenizer, partial, skip_broken=skip_broken)
            made(part)
        return
    others = multiprocessing.active_children()
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
            "a worker of the preparation was killed (was there memory for all?), or could not "
            "start (a script that prepares data needs `if __name__ == '__main__':`). What is done "
            "stays: run the same command again, with fewer --workers if need be"
        ) from error
    except BaseException:  # what is done stays, what is not would take its time
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_given: tuple = ()


def _start(config, tokenizer_json: str, partial: PartialDataset, skip_broken: bool) -> None:
    """What a worker does once."""
    global _given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the caller ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = tokenizer_lib.from_json(tokenizer_json, config.tokenizer, threads=1)
    _given = config, tokenizer, partial, skip_broken


def _end_with_parent() -> None:
    """A caller that was killed cannot end its workers, and they would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _make_in_worker(part: Part) -> None:
    config, tokenizer, partial, skip_broken = _given
    make_part(config, part, tokenizer, partial, skip_broken=skip_broken)


def make_part(config, part: Part, tokenizer, partial: PartialDataset, *, skip_broken: bool) -> None:
    """Makes one part, here and now; of one that cannot be read, says why in the folder as well."""
    with partial.work() as folder:
        count, skip = partial.num_parts, skip_broken
        try:
            made = tokenized_part.write(config, part, count, tokenizer, folder, skip_broken=skip)
        except readers.SourceError as error:
            partial.fail(part.index, str(error), broken=True)
            raise
        partial.publish(part.index, folder, made)
