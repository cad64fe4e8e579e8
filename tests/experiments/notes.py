"""The lab notes of all configs, read once for all tests of a process."""

import functools

from experiments.tables import lab_notes


@functools.cache
def every() -> tuple[lab_notes.LabNote, ...]:
    return tuple(lab_notes.read_all())
