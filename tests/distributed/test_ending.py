"""The end of a job: each process prints one message and exits with one status."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time

import jax
import pytest

from kvjax.distributed import ending
from kvjax.foundation.errors import UserError
from tests.distributed import store as store_lib


class _Clock:
    """A clock that advances by sleeping; each sleep calls `meanwhile`."""

    def __init__(self):
        self.slept, self.meanwhile = [], None

    def monotonic(self):
        return sum(self.slept)

    def sleep(self, seconds):
        self.slept.append(seconds)
        if self.meanwhile:
            self.meanwhile(len(self.slept))


class _Job:
    """One of three processes of a job, which ends with SystemExit; its clock does not wait.

    Attributes:
      aborts: (status, text) of each abort message that was set.
      left: set when the process would have ended.
    """

    def __init__(self, monkeypatch):
        self._patch = monkeypatch
        monkeypatch.setattr(os, "_exit", self._leave)
        monkeypatch.setattr(threading, "excepthook", threading.excepthook)
        monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
        monkeypatch.setattr(ending, "abort_message", self)
        monkeypatch.setattr(ending, "_POLL_SECONDS", 0.001)
        self.start()

    def start(self, index=1, values=()):
        self.store, self.clock = store_lib.Store(values), _Clock()
        self.aborts, self.left = [], threading.Event()
        store_lib.join(self._patch, self.store, 3, index)
        self._patch.setattr(ending, "time", self.clock)
        self._patch.setattr(ending, "_leaving", threading.Lock())

    def set(self, status, text):
        self.aborts.append((status, text()))

    def _leave(self, status):
        self.left.set()
        raise SystemExit(status)


@pytest.fixture
def job(monkeypatch):
    return _Job(monkeypatch)


def _runtime_error(text):
    return type("JaxRuntimeError", (RuntimeError,), {})(text)


def _caused(error, cause, *, explicit=True):
    """Returns an error raised from a cause or, without `from`, while the cause was handled."""
    with contextlib.suppress(type(error)):
        try:
            raise cause
        except Exception as first:
            if explicit:
                raise error from first
            raise error  # noqa: B904
    return error


def test_a_process_prints_and_publishes_its_end(job, monkeypatch, capsys):
    lost = (
        "another process of this job was lost ({}), and no step can be taken without it. Run the "
        "same command on all hosts to resume. (UNAVAILABLE: heartbeat)"
    )
    loss = _runtime_error("UNAVAILABLE: heartbeat\nand pages of addresses")

    def unwritten():
        return _caused(OSError("checkpoint of step 3 was not written"), loss)

    none_silent = lost.format("a connection broke; all processes still live")
    for error, stopped, silent, status, reason in (
        (KeyboardInterrupt(), False, (), 130, "interrupted"),
        (ValueError("in a destructor"), True, (), 130, "interrupted"),
        (UserError("the key is wrong"), True, (), 2, "the key is wrong"),
        (OSError("the disk is full"), False, (), 2, "the disk is full"),
        (ValueError("a bug\nat an address"), False, (), 1, "ValueError: a bug"),
        (loss, False, (2,), 75, lost.format("process 2")),
        (unwritten(), False, (0, 2), 75, lost.format("processes 0, 2")),
        (loss, False, (), 75, none_silent),
        (loss, False, None, 75, lost.format("process 0, the coordinator")),
    ):
        job.start()
        monkeypatch.setattr(ending.interrupted, "_received", stopped)

        def meanwhile(count, silent=silent):
            if silent is None:
                job.store.key_value_dir_get = None
                return
            for i in {0, 1, 2}.difference(silent):
                job.store.key_value_set(f"kvjax/alive/{i}", f"at {count}", allow_overwrite=True)

        job.clock.meanwhile = meanwhile
        with pytest.raises(SystemExit) as end, ending.end_together():
            raise error
        assert end.value.code == status, error
        assert job.store.values["kvjax/ended/1"] == f"{status} {reason}"
        assert job.aborts == [(status, reason), (status, reason), (status, "")]
        assert job.clock.slept == ([5.0] if silent is None else [5.0] * 2 if status == 75 else [])
        traceback, _, message = capsys.readouterr().err.rpartition("kvjax: ")
        assert message == f"{reason}\n" and bool(traceback) == (status == 1)
    job.start()
    with pytest.raises(SystemExit) as end, ending.end_together():
        raise SystemExit(75)  # a stop that all processes agreed upon
    assert end.value.code == 75 and "kvjax/ended/1" not in job.store.values and not job.aborts


def _wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_shows_signs_of_life_until_all_have_ended(job, capsys, caplog):
    """Failing threads and logged exceptions print one line each."""
    job.start(values={"kvjax/end/1/0": "", "kvjax/end/1/2": "", "kvjax/ended/0": "2 "})
    before = set(threading.enumerate())

    def beats():
        return int(job.store.values.get("kvjax/alive/1", 0))

    def fail():
        raise OSError("the barrier failed\nand pages of addresses")

    with ending.end_together():
        (watcher,) = set(threading.enumerate()) - before
        assert watcher.daemon
        _wait_until(lambda: beats() >= 2)
        dir_get, job.store.key_value_dir_get = job.store.key_value_dir_get, None
        beats_before = beats()
        _wait_until(lambda: beats() > beats_before + 2)  # continues if the store does not answer
        job.store.key_value_dir_get = dir_get
        saver = threading.Thread(target=fail, name="saver")
        saver.start()
        saver.join()
        with caplog.at_level("ERROR", logger="absl"):
            logger = logging.getLogger("absl")
            try:
                fail()
            except OSError:
                logger.exception("step %d: finalize failed.", 10)
            logger.error("step %d: no exception", 20)
    assert not watcher.is_alive()
    assert job.store.values["kvjax/end/1/1"] == "" and "kvjax/ended/1" not in job.store.values
    assert capsys.readouterr().err == "thread saver: OSError: the barrier failed\n"
    assert caplog.messages == [
        "step 10: finalize failed. OSError: the barrier failed",
        "step 20: no exception",
    ]
    assert "Traceback" not in caplog.text


def test_a_process_ends_when_another_has_ended(job, capsys):
    job.start(values={"kvjax/ended/0": "2 ", "kvjax/ended/2": "3 the key is wrong"})
    with pytest.raises(SystemExit), ending.end_together():
        assert job.left.wait(10)
        raise SystemExit
    message = "process 2 stopped: the key is wrong"
    assert job.aborts == [(3, message), (3, "")] and job.store.values["kvjax/ended/1"] == "3 "
    assert capsys.readouterr().err.splitlines()[0] == f"kvjax: {message}"


def test_process_0_stays_while_others_show_signs_of_life(job):
    """Process 1 beats for 20 seconds, then falls silent or ends; process 2 has ended."""
    for ends in (False, True):
        job.start(index=0, values={"kvjax/ended/2": "2 "})

        def meanwhile(count, ends=ends):
            beats = {1: min(count, 200), 2: count}
            for i, beat in beats.items():
                job.store.key_value_set(f"kvjax/alive/{i}", f"{beat}", allow_overwrite=True)
            if ends and count == 250:
                job.store.key_value_set("kvjax/ended/1", "2 ")

        job.clock.meanwhile = meanwhile
        with pytest.raises(SystemExit):
            ending._publish_and_exit("over", 2)
        assert set(job.clock.slept) == {0.1}
        assert job.clock.monotonic() == pytest.approx(25 if ends else 30.1, abs=0.11)
        assert job.store.values["kvjax/ended/0"] == "2 over"


@pytest.mark.parametrize("when", ["it tells the others", "it has told its user"])
def test_a_coordinator_that_is_gone_first_changes_no_status_and_no_message(when):
    """When process 0 ends, the service aborts processes that are still connected."""
    condition = "value != '2 '" if "others" in when else "value == '2 '"
    code = (
        "import os\nfrom kvjax.distributed import agreement, ending\n"
        "class Client:\n"
        "    def key_value_set(self, key, value, **_):\n"
        f"        if {condition}: os.abort()\n"
        "agreement.client, agreement.index = Client, lambda: 1\n"
        "ending.abort_message.set(75, lambda: ending.lost_message('who knows'))\n"
        "print('not yet written')\n"
        "ending._publish_and_exit('the key is wrong', 2)\n"
    )
    buffered = os.environ | dict(PYTHONUNBUFFERED="")
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=buffered
    )
    assert run.returncode == 2 and run.stderr.strip() == "kvjax: the key is wrong"
    assert run.stdout == ("" if "others" in when else "not yet written\n")


def test_last_words():
    """An abort from C++ ends with a sentence and the status that was set."""
    code = (
        "import os, sys\n"
        "from kvjax.distributed import ending\n"
        "ending.abort_message.set(75, lambda: ending.lost_message('who knows'))\n"
        "os.abort()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 75
    assert run.stderr == (
        "\nkvjax: another process of this job was lost (who knows), and no step can be taken "
        "without it. Run the same command on all hosts to resume\n"
    )


def test_errors_of_a_lost_process():
    """A failed save may be caused by a lost process."""
    for text, is_loss in (
        ("UNKNOWN: Gloo all-reduce failed", True),
        ("INTERNAL: ncclInternalError", True),
        ("INTERNAL: Connection closed", True),
        ("INTERNAL: a socket broke", True),
        ("UNAVAILABLE: no answer", True),
        ("INTERNAL: heartbeat timeout", True),
        ("INTERNAL: reset by peer", True),
        ("RESOURCE_EXHAUSTED: NCCL could not allocate", False),
        ("INTERNAL: ncclInternalError: out of memory", False),
        ("INVALID_ARGUMENT: peer access", False),
        ("UNIMPLEMENTED: gloo", False),
        ("INTERNAL: something else", False),
    ):
        error = _runtime_error(text)
        for end in (error, _caused(OSError(), error), _caused(OSError(), error, explicit=False)):
            assert ending._lost_process_error(end) is (error if is_loss else None), text
    assert ending._lost_process_error(_caused(OSError(), ValueError("gloo"))) is None
    assert ending._lost_process_error(jax.errors.JaxRuntimeError("gloo")) is not None
