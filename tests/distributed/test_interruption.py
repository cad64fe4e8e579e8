"""A signal ends a process before its next step, and all processes after the same one."""

import signal
import types

import jax
import pytest

from kvjax import distributed
from kvjax.distributed import agreement


class Store:
    """The coordination service's keys, as far as one process uses them here."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_alone_stops_before_its_next_step(number):
    """A second signal is left to the system, which ends the process; SIGHUP comes in twos."""
    before = signal.getsignal(number)
    interruption = distributed.Interruption()
    with interruption.watching():
        assert not interruption.due(0)
        signal.raise_signal(number)
        assert interruption.due(1) and interruption.signal is number
        hangup = number == signal.SIGHUP
        assert signal.getsignal(number) == (signal.SIG_IGN if hangup else signal.SIG_DFL)
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored():
    """SIGHUP under `nohup`, Ctrl-C in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = distributed.Interruption()
        with interruption.watching():
            signal.raise_signal(signal.SIGHUP)
            assert not interruption.due(0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("who", [0, 1])
def test_all_stop_after_the_same_step(monkeypatch, ahead, who):
    """Two processes, the second `ahead` steps further on, one of them told at step 5."""
    store = Store()
    state = types.SimpleNamespace(client=store, num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    both = [distributed.Interruption(), distributed.Interruption()]
    ended = [None, None]
    for step in range(20):
        for i, interruption in enumerate(both):
            mine = step + (ahead if i else 0)
            if i == who and mine == 5:
                interruption._received = signal.SIGTERM
            if ended[i] is None and interruption.due(mine):
                ended[i] = mine
    assert ended == [7, 7]
    assert {i.signal for i in both} == {signal.SIGTERM}


def test_the_first_of_two_signals_counts(monkeypatch):
    state = types.SimpleNamespace(client=Store(), num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    one, other = distributed.Interruption(), distributed.Interruption()
    one._received, other._received = signal.SIGINT, signal.SIGTERM
    assert [one.due(3), other.due(4), one.due(4), other.due(5), one.due(5)] == [
        *(False, False, False),
        *(True, True),
    ]
    assert one.signal is other.signal is signal.SIGINT
    assert distributed.STATUS == {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGHUP: 129}


def test_a_loop_that_ends_by_itself_first_ends_for_no_signal(monkeypatch):
    """The other processes end so too, and some of them have not heard of the signal."""
    state = types.SimpleNamespace(client=Store(), num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    interruption = distributed.Interruption()
    interruption._received = signal.SIGTERM
    assert not interruption.due(3) and not interruption.due(4)
    assert interruption.signal is None
    assert interruption.due(5) and interruption.signal is signal.SIGTERM
