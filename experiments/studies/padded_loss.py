"""Effect of padding in the loss on perplexities and on differences between models.

    python -m experiments.studies.padded_loss [--seeds=3] [--save]

The code of projection sharing pads each document to a row with EOS, truncates longer ones, and
averages the loss over all targets, padding included: hence the perplexities of about 5 in its Table
4. Here models of bytes learn the embedded books' paragraphs in that form and packed (one stream
without padding or truncation), QKV and two tied variants, with equal steps. Held-out paragraphs are
evaluated three ways: as padded rows with padding counted, text of the same rows alone, and packed.
With f the share of targets that are text, counted nats are f times the text's if padding costs
nothing, so a difference of 1 % in perplexity is one of about 1/f %. Prints f, perplexities per
byte, and differences from QKV, means over seeds with 95 % intervals.
"""

from collections.abc import Mapping, Sequence
import functools
import math

import jax.numpy as jnp
import numpy as np

from experiments.studies import in_process
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
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
    how = dict(positions="learned", activation="gelu_exact", max_positions=LENGTH, mlp_dim=MLP)
    how |= dict(tied_head=True, embedding_std=0.02, matrix_std=0.02)
    return learner.classic(256, WIDTH, LAYERS, HEADS, attention=dict(tie=tie), **how)


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
    found = {}
    for name in JUDGED:
        rows = rows_of("validation", "packed" if name == "packed" else "padded")
        counts = np.ones_like(rows["real"]) if name == "counted" else rows["real"]
        found[name] = learner.split(rows | dict(counts=counts), 128)
    return found


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
    found = model.train(seed, learner.in_order(rows, BATCH, epochs, seed))
    nats = {name: model.accuracy(found, batches) for name, batches in held_out().items()}
    return nats | dict(loss=found.loss)


def cell(tie: str, form: str, steps: int) -> Cell:
    return Cell(
        name=f"{tie}_{form}_{steps}",
        settings=dict(tie=tie, form=form, steps=steps),
        train=functools.partial(train, tie, form, steps),
    )


def rows(cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """Returns a row per model: perplexities, and differences from QKV in per cent."""
    first = {c.settings["form"]: c for c in cells if c.settings["tie"] == FIRST}
    found = []
    for one in cells:
        runs = in_process.runs_of(one, kept)
        if not runs:
            continue
        form, perplexity, against = one.settings["form"], {}, {}
        other = first.get(form, one)
        for name in JUDGED:
            nats = in_process.figure(one, kept, name)
            now = estimate([math.exp(x) for x in nats.values()])
            perplexity[name] = estimated("mean", now, "half_interval")
            theirs = {} if other is one else in_process.figure(other, kept, name)
            if ratio := difference(nats, theirs):  # of logarithms
                against[name] = estimated("nats", ratio, "half_interval")
                against[name]["percent"] = 100 * math.expm1(ratio.mean)
        row = dict(tie=one.settings["tie"], trained=form, share_of_text=share_of_text("validation"))
        row |= dict(seeds=len(runs), perplexity=perplexity, against_first=against)
        found.append(row)
    return found


_HEADER = ("model", "trained on", "text, of targets", "seeds", "perplexity, padding counted")
_HEADER += ("of the same text", "packed", "against QKV, nats: counted", "text", "packed")


def _cells(row: Mapping) -> tuple:
    perplexity = [shown(row["perplexity"][name], "mean", ".3f") for name in JUDGED]
    others = (row["against_first"].get(name) for name in JUDGED)
    against = [shown(other, "nats", "+.4f", missing="") for other in others]
    share = f"{row['share_of_text']:.3f}"
    return TIES[row["tie"]], row["trained"], share, row["seeds"], *perplexity, *against


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.names("ties", TIES)
    parser.names("forms", FORMS)
    parser.count("steps", STEPS, f"steps of {BATCH} rows of {LENGTH} bytes ({STEPS})", least=10)
    options = parser.parse(arguments)
    every = [cell(tie, form, options.steps) for form in FORMS for tie in TIES]
    cells = [cell(tie, form, options.steps) for form in options.forms for tie in options.ties]

    def figures_of(kept: Kept) -> dict:
        return dict(steps=options.steps, rows=rows(every, kept))

    how = dict(places=(__file__,), only=dict(tie=options.ties, trained=options.forms))
    return in_process.study(NAME, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
