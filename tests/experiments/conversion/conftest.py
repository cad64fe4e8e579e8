"""Fixtures of the conversion studies: small random models, results in a temporary folder."""

import pytest

from experiments import record
from experiments.conversion import texts, whisper_converted, whisper_tuning
from experiments.studies import conversion
from kvjax.foundation import command_line
from tests.experiments.conversion import whisper_stand_in as stand_in

SIZES = whisper_converted.Sizes(row_length=12, validation_rows=3, calibration_rows=20)
WORDS = "the king and the queen of all that is "


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Redirects results to a temporary folder and fits ranks and texts to the stand-ins."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(whisper_converted, "RANKS", (6, 9))
    monkeypatch.setattr(whisper_converted, "RESIDUAL_RANKS", (0, 2))
    monkeypatch.setattr(whisper_tuning, "BATCH", 2)
    monkeypatch.setattr(texts, "training_text", lambda: [WORDS * 40, WORDS[::-1] * 20])
    monkeypatch.setattr(texts, "validation_text", lambda: [WORDS[10:] * 9])


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    stand_in.write(folder)
    return folder


@pytest.fixture(scope="module")
def subject(whisper_folder):
    """A Whisper of 2 layers, 3 heads of 4."""
    return whisper_converted.Subject(whisper_folder, SIZES)


@pytest.fixture
def run(subject, monkeypatch, capsys):
    """Returns a function from options to status, standard output and standard error."""
    monkeypatch.setattr(conversion, "_whisper", lambda options: subject)

    def run(*options):
        status = command_line.status(conversion.main, options)
        return status, *capsys.readouterr()

    return run
