"""Trains LRKV and other mechanisms on longer rows; prints bits per byte by position.

    python -m experiments.studies.long_rows [--seeds=3] [--save]

LRKV's blog post makes this comparison without numbers. Tiny configs are trained on rows of 256 and
of 1,024 tokens, with the same number of tokens, and evaluated on held-out rows of 1,024: this shows
how much each mechanism gains from distant context. Models trained on rows of 256 show the loss
beyond their training length. Initial weights and data order depend on the seed, so a run is
compared with MHA of the same seed and row length. If `language_models` has the same --runs, runs on
rows of 256 are shared. Intervals are 95 % (Student's t over seeds).
"""

from collections.abc import Mapping, Sequence
import itertools

from experiments.studies import demo_size, side_by_side
from experiments.studies.demo_size import TOKENS_PER_STEP
from experiments.studies.grid import Cell, FinishedRuns
from experiments.studies.options import Parser, estimated, local_folder, shown
from experiments.tasks import positions, text
from experiments.tasks.positions import EDGES, by_position
from kvjax.foundation import command_line
from kvjax.foundation.intervals import difference, estimate

NAME = "long_rows"
MECHANISMS = ("mha", "lrkv", "gqa", "mqa", "mla")
FIRST = "mha"
LENGTHS = (256, 1024)  # tokens per training row


def cell(mechanism: str, length: int) -> Cell:
    """Returns a mechanism's cell with rows of a length; 256 is the tiny config's length."""
    config, against = demo_size.tiny(mechanism), "" if mechanism == FIRST else FIRST
    if length == 256:
        return Cell(mechanism, config, {}, against)
    rows = {"data.sequence_length": length, "train.batch_size": TOKENS_PER_STEP // length}
    return Cell(_name(mechanism, length), config, rows, against and _name(FIRST, length))


def _name(mechanism: str, length: int) -> str:
    return mechanism if length == 256 else f"{mechanism}_t{length}"


def rows(seeds: Mapping[str, Mapping[int, dict]]) -> list[dict]:
    """Returns a row per model: bits per byte between `EDGES`, and differences from MHA.

    Args:
      seeds: figures by cell and seed.
    """

    def at(name, i):
        return {seed: run["by_position"][i] for seed, run in seeds.get(name, {}).items()}

    table = []
    for length in LENGTHS:
        for mechanism in MECHANISMS:
            name = _name(mechanism, length)
            if not seeds.get(name):
                continue
            places = []
            for i, between in enumerate(itertools.pairwise(EDGES)):
                bpb, reference = at(name, i), at(_name(FIRST, length), i)
                gap = None if mechanism == FIRST else difference(bpb, reference)
                place = dict(positions=list(between))
                place |= estimated("bpb", estimate(list(bpb.values())))
                places.append(place | estimated("difference", gap))
            row = dict(mechanism=mechanism, length=length, seeds=sorted(seeds[name]))
            table.append(row | dict(places=places))
    return table


_HEADER = (
    "mechanism",
    "trained on rows of",
    *(f"{a}-{b - 1}" for a, b in itertools.pairwise(EDGES)),
)


def _cells(row: Mapping) -> tuple:
    def text(place: Mapping) -> str:
        return shown(place, "difference", "+.4f", missing=shown(place, "bpb", ".4f"))

    return row["mechanism"], f"{row['length']:,}", *map(text, row["places"])


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.count("steps", 128, "training steps of 8,192 tokens (128: 1.0M)")
    parser.names("mechanisms", MECHANISMS)
    parser.runs("runs/studies")
    options = parser.parse(arguments)
    options.runs = local_folder(options.runs)
    all_cells = [cell(name, length) for length in LENGTHS for name in MECHANISMS]
    cells = [cell(name, length) for length in LENGTHS for name in options.mechanisms]

    def figures_of(finished: FinishedRuns) -> dict:
        tokens = options.steps * TOKENS_PER_STEP
        return dict(tokens=tokens, edges=EDGES, rows=rows(finished.by_cell(all_cells)))

    how = dict(code_files=(positions.__file__, text.__file__), further_figures=by_position)
    how |= dict(
        note="Bits per byte by position in rows of 1,024; of others the difference from MHA."
    )
    table = ("rows", _HEADER, _cells)
    return side_by_side.study(NAME, cells, options, figures_of, [table], **how)


if __name__ == "__main__":
    command_line.run(main)
