"""Measures the effect of padding in the loss on perplexities and on differences between models.

    python -m experiments.studies.padded_loss [--seeds=3] [--save]

The code of projection sharing pads each document to a row with EOS, truncates longer documents, and
averages the loss over all targets, padding included. This explains the perplexities of about 5 in
the paper's Table 4. Here models of bytes (QKV and two tied variants) learn the paragraphs of the
embedded books, either in that form, or packed into one stream without padding or truncation, with
equal steps. Held-out paragraphs are evaluated in three ways: on padded rows with padding counted,
on the text of the same rows alone, and packed. Let f be the share of targets that are text. If the
loss of padding is 0, nats per counted target are f times the nats per target of text, and a
difference of 1 % in perplexity with padding is one of about 1/f % without. Prints f, perplexities
per byte, and differences from QKV, means over seeds with 95 % intervals.
"""

from collections.abc import Mapping, Sequence
import functools
import math

import jax.numpy as jnp
import numpy as np

from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import learner, text
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line
from kvjax.foundation.intervals import difference, estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

NAME = "padded_loss"
FIRST = "none"  # the reference of differences
TIES = {"none": "QKV", "kv": "Q-K=V", "qkv": "Q=K=V"}
FORMS = {"padded": text.padded, "packed": text.packed}
WIDTH, HEADS, LAYERS, MLP, LENGTH, BATCH, STEPS = 64, 4, 4, 256, 128, 32, 600
JUDGED = ("counted", "text", "packed")  # nats per target of held-out paragraphs


def transformer(tie: str) -> TransformerConfig:
    shared = dict(positions="learned", activation="gelu_exact", max_positions=LENGTH, mlp_dim=MLP)
    shared |= dict(tied_head=True, embedding_std=0.02, matrix_std=0.02)
    return learner.classic(256, WIDTH, LAYERS, HEADS, attention=dict(tie=tie), **shared)


@functools.cache
def rows_of(split: str, form: str) -> dict[str, np.ndarray]:
    """Returns all rows of a split, padded or packed."""
    return FORMS[form](text.paragraphs(split), LENGTH)


def share_of_text(split: str) -> float:
    """Returns f, the share of text among the targets of padded rows."""
    return float(rows_of(split, "padded")["real"].mean())


@functools.cache
def held_out() -> dict[str, list[dict[str, np.ndarray]]]:
    """Returns batches of held-out rows by evaluation; `counts` weights the targets of the mean."""
    batches = {}
    for name in JUDGED:
        rows = rows_of("validation", "packed" if name == "packed" else "padded")
        counts = np.ones_like(rows["real"]) if name == "counted" else rows["real"]
        batches[name] = learner.split(rows | dict(counts=counts), 128)
    return batches


@functools.cache
def _learner(tie: str, steps: int) -> Learner:
    config, compute = transformer(tie), Compute(unroll=True)

    def nats(model, batch):
        return learner.nats(model.logits(model(batch["x"], compute=compute)), batch["y"])

    recipe = learner.Recipe(steps=steps, learning_rate=2e-3, warm_up=steps // 10, clip=1.0)
    return Learner(
        lambda key: Transformer(config, key),
        recipe,
        lambda model, batch, _: jnp.mean(nats(model, batch)),  # padding included
        lambda model, batch: (nats(model, batch), batch["counts"]),
    )


def train(tie: str, form: str, steps: int, seed: int) -> dict:
    """Trains a model; returns its nats per target by evaluation."""
    model, rows = _learner(tie, steps), rows_of("train", form)
    epochs = math.ceil(steps * BATCH / (len(rows["x"]) - BATCH))
    trained = model.train(seed, learner.in_order(rows, BATCH, epochs, seed))
    nats = {name: model.accuracy(trained, batches) for name, batches in held_out().items()}
    return nats | dict(loss=trained.loss)


def cell(tie: str, form: str, steps: int) -> Cell:
    return Cell(
        name=f"{tie}_{form}_{steps}",
        settings=dict(tie=tie, form=form, steps=steps),
        train=functools.partial(train, tie, form, steps),
    )


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns a row per model: perplexities, and differences from QKV in per cent."""
    references = {c.settings["form"]: c for c in cells if c.settings["tie"] == FIRST}
    table = []
    for cell in cells:
        runs = in_process.runs_of(cell, finished)
        if not runs:
            continue
        form, perplexity, against = cell.settings["form"], {}, {}
        reference = references.get(form, cell)
        for name in JUDGED:
            nats = in_process.figure(cell, finished, name)
            interval = estimate([math.exp(x) for x in nats.values()])
            perplexity[name] = estimated("mean", interval, "half_interval")
            reference_nats = (
                {} if reference is cell else in_process.figure(reference, finished, name)
            )
            if ratio := difference(nats, reference_nats):  # difference of logarithms
                against[name] = estimated("nats", ratio, "half_interval")
                against[name]["percent"] = 100 * math.expm1(ratio.mean)
        row = dict(
            tie=cell.settings["tie"], trained=form, share_of_text=share_of_text("validation")
        )
        row |= dict(seeds=len(runs), perplexity=perplexity, against_first=against)
        table.append(row)
    return table


_HEADER = ("model", "trained on", "text, of targets", "seeds", "perplexity, padding counted")
_HEADER += ("of the same text", "packed", "against QKV, nats: counted", "text", "packed")


def _cells(row: Mapping) -> tuple:
    perplexity = [shown(row["perplexity"][name], "mean", ".3f") for name in JUDGED]
    gaps = (row["against_first"].get(name) for name in JUDGED)
    against = [shown(gap, "nats", "+.4f", missing="") for gap in gaps]
    share = f"{row['share_of_text']:.3f}"
    return TIES[row["tie"]], row["trained"], share, row["seeds"], *perplexity, *against


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.names("ties", TIES)
    parser.names("forms", FORMS)
    parser.count("steps", STEPS, f"steps of {BATCH} rows of {LENGTH} bytes ({STEPS})", least=10)
    options = parser.parse(arguments)
    all_cells = [cell(tie, form, options.steps) for form in FORMS for tie in TIES]
    cells = [cell(tie, form, options.steps) for form in options.forms for tie in options.ties]

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(steps=options.steps, rows=rows(all_cells, finished))

    how = dict(code_files=(__file__,), only=dict(tie=options.ties, trained=options.forms))
    return in_process.study(NAME, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
