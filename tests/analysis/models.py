"""Models and texts that tests of several reports share, and a check of any section."""

import dataclasses
import json
import re

import numpy as np

from kvjax.analysis.page import document
from kvjax.analysis.page.section import Section
from tests.convert import workdirs

SEVERAL_KINDS = dict(  # of the keys of `model`
    num_layers=3,
    window=4,
    window_layers=(1, 0, 0),
    window_rope_base=50.0,
    rope_layers=(1, 1, 0),
    rope_attention_factor=1.3,
    attention_softcap=0.8,
)


def texts(length: int) -> dict[str, np.ndarray]:
    """Returns two texts of random tokens."""
    return {
        name: np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
        for seed, name in enumerate(("one", "two"))
    }


def model(block="llama", mechanism=None, *, num_layers=2, **keys) -> workdirs.Made:
    """Returns a model of one of `workdirs.BLOCKS` with other keys; by default of two KV heads."""
    block = dataclasses.replace(workdirs.BLOCKS[block], num_layers=num_layers, **keys)
    mechanism = mechanism or workdirs.grouped(2, 2, qk_norm="none")
    return workdirs.Made(workdirs.config(block, mechanism))


def check_section(section: Section) -> None:
    """Checks that a section can be stored and shown, and that its figures have words."""
    json.dumps(section.data, allow_nan=False)
    assert section.lead and section.figures and section.tables
    assert document.page("t", "", [section], {}).count("<svg") == len(section.figures)
    for figure in section.figures:
        words = figure.alternative
        assert re.search(r"\d", words) and not re.search(r"\bnan\b|None", words), words
    for table in section.tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
