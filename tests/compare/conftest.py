"""Runs to compare."""

import pytest

from kvjax.compare import report
from tests import golden
from tests.compare.written import write_run


@pytest.fixture
def two(tmp_path):
    """Two mechanisms with two seeds, and an unfinished run."""
    for seed in range(2):
        write_run(tmp_path / "runs" / f"l{seed}", seed=seed, bpb=(4, 3, 2.5, 2.2 + seed / 10))
        options = dict(seed=seed, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
        write_run(tmp_path / "runs" / f"m{seed}", **options)
    write_run(tmp_path / "runs" / "z", seed=7, config="mha_tiny", steps=(25,), bpb=(4,))
    return tmp_path / "runs"


@pytest.fixture
def drawn(monkeypatch):
    """Sections and panels of each comparison; drawings are texts of what would be drawn."""
    golden.note_drawings(monkeypatch)
    sections, panels = [], []
    make = report.sections
    monkeypatch.setattr(
        report, "sections", lambda *arguments: sections.append(make(*arguments)) or sections[-1]
    )
    monkeypatch.setattr(
        "kvjax.analysis.page.draw.picture",
        lambda drawn_panels: panels.append(drawn_panels) or b"a picture",
    )
    return sections, panels
