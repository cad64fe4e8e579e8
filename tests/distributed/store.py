"""The coordination service's keys in memory, and threads that are processes of one job."""

import collections
from concurrent import futures
import threading

import jax

from kvjax.distributed import agreement


class Store:
    """The part of JAX's coordination service client that kvjax uses, in memory.

    Attributes:
      values: by key.
      awaited: keys that a process waited for.
    """

    def __init__(self, values=()):
        self.values, self.awaited = dict(values), set()
        self._changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, folder):
        with self._changed:
            return sorted((k, v) for k, v in self.values.items() if k.startswith(folder))

    def blocking_key_value_get(self, key, milliseconds):
        """Times out once for each key, and fails the test for a key that is never set."""
        del milliseconds
        with self._changed:
            if key not in self.awaited:
                self.awaited.add(key)
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: 5 s")
            if not self._changed.wait_for(lambda: key in self.values, 10):
                raise TimeoutError(f"nobody sets {key}")
            return self.values[key]


class Member(threading.local):
    """JAX's distributed state of one process of a job; each thread has its own."""

    def __init__(self, store, count, index=0):
        self.client, self.num_processes, self.process_id = store, count, index


class _Counts(threading.local):
    """A counter with separate counts in each thread."""

    def __init__(self):
        self._counts = collections.Counter()

    def __getitem__(self, name):
        return self._counts[name]

    def __setitem__(self, name, count):
        self._counts[name] = count


def join(monkeypatch, *arguments) -> Member:
    """Makes this thread, and each thread started later, a process of a job; see `Member`."""
    member = Member(*arguments)
    monkeypatch.setattr(agreement, "_state", lambda: member)
    monkeypatch.setattr(agreement, "_exchanges", _Counts())
    return member


def together(monkeypatch, store, count, function) -> list:
    """Returns a function's result in each process, given the process's index."""
    member, begun = join(monkeypatch, store, count), threading.Barrier(count)

    def process(index):
        begun.wait(10)  # until all processes have a thread
        member.process_id = index
        return function(index)

    with futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(process, range(count)))
