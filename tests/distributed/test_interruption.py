"""A signal ends a process before its next step, and all processes after the same one."""

import itertools
import os
import signal

import jax
import pytest

from kvjax import distributed
from kvjax.distributed.interruption import interrupted
from tests.distributed.store import Store, join


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_alone_stops_before_its_next_step(number, monkeypatch, capfd):
    """A second signal ends the process, except for SIGHUP, which comes twice.

    SIGHUP redirects output to /dev/null, since its terminal is closed.
    """
    before, replaced = signal.getsignal(number), []
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: replaced.append(descriptors))
    interruption = distributed.Interruption()
    with interruption.handling_signals():
        assert not interruption.should_stop(0)
        signal.raise_signal(number)
        assert interruption.should_stop(1) and interruption.signal is number
        hangup = number == signal.SIGHUP
        assert signal.getsignal(number) == (signal.SIG_IGN if hangup else signal.SIG_DFL)
        signal.signal(number, signal.SIG_IGN)
    assert signal.getsignal(number) == before
    if hangup:
        (nowhere, _), _ = replaced
        assert replaced == [(nowhere, 1), (nowhere, 2)]
        with pytest.raises(OSError):
            os.fstat(nowhere)
    stops = "stops after the work under way; a second signal ends it at once"
    message = f"\nkvjax: {number.name}: {stops}\n"
    assert capfd.readouterr() == ("", "" if hangup else message)


def test_a_swallowed_ctrl_c_ends_the_loop(monkeypatch):
    monkeypatch.setattr(interrupted, "_received", True)
    monkeypatch.setattr(interrupted, "_taken", False)
    interruption = distributed.Interruption()
    assert (
        interruption.should_stop(0) and interruption.signal is signal.SIGINT and interrupted._taken
    )


def test_an_ignored_signal_stays_ignored():
    """`nohup` ignores SIGHUP, and scripts ignore Ctrl-C for background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = distributed.Interruption()
        with interruption.handling_signals():
            signal.raise_signal(signal.SIGHUP)
            assert not interruption.should_stop(0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_all_stop_after_the_same_step(monkeypatch):
    """Two processes, the second up to one step ahead; one gets a signal at step 5."""
    for signalled, ahead in itertools.product((0, 1), (0, 1)):
        join(monkeypatch, Store(), 2)
        interruptions = [distributed.Interruption(), distributed.Interruption()]
        ended = [None, None]
        for step in range(20):
            for i, interruption in enumerate(interruptions):
                own_step = step + (ahead if i else 0)
                if i == signalled and own_step == 5:
                    interruption._received = signal.SIGTERM
                if ended[i] is None and interruption.should_stop(own_step):
                    ended[i] = own_step
        assert ended == [7, 7], (signalled, ahead)
        assert {i.signal for i in interruptions} == {signal.SIGTERM}


def test_the_first_of_two_signals_counts(monkeypatch):
    join(monkeypatch, Store(), 2)
    first, second = distributed.Interruption(), distributed.Interruption()
    first._received, second._received = signal.SIGINT, signal.SIGTERM
    assert [
        first.should_stop(3),
        second.should_stop(4),
        first.should_stop(4),
        second.should_stop(5),
        first.should_stop(5),
    ] == [
        *(False, False, False),
        *(True, True),
    ]
    assert first.signal is second.signal is signal.SIGINT
    assert distributed.STATUS == {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGHUP: 129}


def test_a_loop_that_ends_by_itself_first_ends_for_no_signal(monkeypatch):
    """Other processes may not have read the request, and reach the last step too."""
    store, interruption = Store(), distributed.Interruption()
    join(monkeypatch, store, 2)
    interruption._received = signal.SIGTERM
    assert not interruption.should_stop(3) and not interruption.should_stop(4)
    assert interruption.signal is None
    assert interruption.should_stop(5) and interruption.signal is signal.SIGTERM
    assert store.values == {"kvjax/stop": "5 SIGTERM"}

    def fails(key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    store.key_value_try_get = fails
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        distributed.Interruption().should_stop(6)
