"""What counts as a lost process, and what is said of it."""

import subprocess
import sys

import absl.logging
import pytest

from kvjax.distributed import ending


@pytest.mark.parametrize(
    "text, lost",
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
        ("UNAVAILABLE: heartbeat timeout", True),
        ("RESOURCE_EXHAUSTED: NCCL could not allocate", False),
        ("INTERNAL: ncclInternalError: out of memory", False),
        ("INVALID_ARGUMENT: peer access", False),
        ("INTERNAL: something else", False),
    ],
)
def test_what_counts_as_a_lost_process(text, lost):
    assert ending._is_loss(text) == lost


def test_what_a_library_logs_of_a_loss_is_one_line(caplog):
    logger = absl.logging.get_absl_logger()
    logger.addFilter(ending._without_traceback)
    try:
        with caplog.at_level("ERROR", logger="absl"):
            try:
                raise OSError("the barrier failed\nand pages of addresses")
            except OSError:
                absl.logging.exception("step %d: finalize failed.", 10)
            absl.logging.error("step %d: no exception", 20)
    finally:
        logger.removeFilter(ending._without_traceback)
    assert caplog.messages == [
        "step 10: finalize failed. OSError: the barrier failed",
        "step 20: no exception",
    ]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("when", ["it tells the others", "it has told its user"])
def test_a_coordinator_that_is_gone_first_changes_no_status_and_no_message(when):
    """The service aborts whoever is still connected when process 0 ends."""
    said = "value != '2 '" if "others" in when else "value == '2 '"
    code = (
        "import os\nfrom kvjax.distributed import agreement, ending\n"
        "class Client:\n"
        "    def key_value_set(self, key, value, **_):\n"
        f"        if {said}: os.abort()\n"
        "agreement.client, agreement.index = Client, lambda: 1\n"
        "ending.last_words.set(75, lambda: ending.lost('who knows'))\n"
        "ending._end('the key is wrong', 2)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stderr.strip() == "kvjax: the key is wrong"


def test_last_words():
    """An abort from C++ ends with a sentence and the status that was set."""
    code = (
        "import os, sys\n"
        "from kvjax import distributed\nfrom kvjax.distributed import ending\n"
        "distributed.last_words.checkpoints = lambda: 'Checkpoints of steps [7] are here. '\n"
        "distributed.last_words.set(75, lambda: ending.lost('who knows'))\n"
        "os.abort()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 75
    assert run.stderr == (
        "\nkvjax: another process of this job was lost (who knows), and no step can be taken "
        "without it. Checkpoints of steps [7] are here. Run the same command on all hosts to go "
        "on\n"
    )


def test_process_0_stays_while_others_show_signs_of_life(monkeypatch):
    """Beats of process 1 go on for longer than its patience; then it falls silent."""
    asked = []

    class Client:
        def key_value_dir_get(self, key):
            asked.append(key)
            if key == ending._ENDED:
                return [(f"{key}0", "2 ")]
            return [(f"{key}{i}", str(min(len(asked), 20))) for i in (0, 1)]

    clock = lambda: 0.1 * len(asked)
    monkeypatch.setattr(ending.agreement, "count", lambda: 2)
    monkeypatch.setattr(ending, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(ending.time, "monotonic", clock)
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)
    ending._stay(Client())
    assert 3.0 <= clock() < 3.5  # of beats 2 s, of silence 1 s


def test_a_loss_is_seen_behind_what_it_caused():
    """A checkpoint that a lost process left unwritten is no fault of the disk."""
    wrong = lambda text: type("JaxRuntimeError", (RuntimeError,), {})(text)
    gone, full = wrong("UNAVAILABLE: connection closed by peer"), wrong("RESOURCE_EXHAUSTED: gloo")

    def caused_by(cause):
        try:
            raise OSError("checkpoint of step 3 was not written") from cause
        except OSError as error:
            return error

    assert ending._loss_behind(gone) is gone
    assert ending._loss_behind(caused_by(ValueError("several"))) is None
    assert ending._loss_behind(caused_by(full)) is None
    assert ending._loss_behind(caused_by(gone)) is gone
