"""Cross-attention of LRKV and MHA in a small encoder-decoder trained from scratch.

    python -m experiments.studies.cross_attention [--seeds=3] [--save]

Task: spell the digits of the source in reverse order, letter by letter ("3 0 7" becomes "seven zero
three"). The learning rate decays to 0 over --steps. A held-out answer is decoded greedily from the
caches, and is right if all its letters are right. LRKV's paper proposes cross-attention for future
work (section 7), without results. In "tied" models the encoder's self-attention has one projection
for queries, keys and values (projection sharing, section 2.5).
"""

from collections.abc import Mapping, Sequence
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, greedy
from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from kvjax.attention import GroupedConfig
from kvjax.foundation import command_line
from kvjax.foundation.intervals import estimate
from kvjax.model.config import BlockConfig

NAME = "cross_attention"
NAMES = "zero one two three four five six seven eight nine".split()
LETTERS = "".join(sorted(set("".join(NAMES)))) + " "
BEGIN, END = 0, 1  # tokens around an answer; END also pads
FIRST_DIGIT, FIRST_LETTER = 2, 12
VOCABULARY = FIRST_LETTER + len(LETTERS)
DIGITS = 8  # maximum per source
ANSWER = DIGITS * 6  # tokens of the longest answer with END: names have at most five letters
HEADS, DIM, RANK, MLP = 4, 16, 8, 256
BATCH, HELD_OUT, EVERY = 64, 512, 100  # rows per step, per evaluation; steps between evaluations
RIGHT = 0.99  # held-out accuracy that counts as solved


def _grouped(kv_heads: int, bases: int, rank: int = 0, tie: str = "none") -> GroupedConfig:
    heads = dict(num_heads=HEADS, num_kv_heads=kv_heads, num_bases=bases)
    return GroupedConfig(**heads, rank=rank, key_dim=DIM, value_dim=DIM, tie=tie)


MHA = _grouped(HEADS, HEADS)
LRKV = _grouped(HEADS, 1, RANK)
KINDS = {  # encoder's self-attention, and cross-attention
    "mha": (MHA, MHA),
    "lrkv": (MHA, LRKV),
    "mqa": (MHA, _grouped(1, 1)),
    "lrkv_tied": (_grouped(HEADS, HEADS, tie="qkv"), LRKV),
}


def config_of(kind: str) -> EncoderDecoderConfig:
    encoder, cross = KINDS[kind]
    sizes = dict(num_layers=2, d_model=HEADS * DIM, mlp_dim=MLP)
    block = BlockConfig(**sizes, zero_outputs=False, embedding_norm=False)
    mechanisms = dict(encoder=encoder, decoder=MHA, cross=cross)
    return EncoderDecoderConfig(block=block, **mechanisms, vocab_size=VOCABULARY)


def questions(
    rng: np.random.Generator, count: int, *, held_out: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws sources [count, DIGITS], their lengths, and answers [count, ANSWER], padded with END.

    Args:
      held_out: draw only sources that are never trained on (`_is_held_out`), or only others.
    """
    candidates = count * (16 if held_out else 2)
    lengths = rng.integers(1, DIGITS + 1, candidates, dtype=np.int32)
    digits = rng.integers(0, 10, (candidates, DIGITS))
    chosen = np.flatnonzero(_is_held_out(digits, lengths) == held_out)[:count]
    assert len(chosen) == count
    digits, lengths = digits[chosen], lengths[chosen]
    answers = np.full((count, ANSWER), END, np.int32)
    for row, length, answer in zip(digits, lengths, answers, strict=True):
        text = " ".join(NAMES[digit] for digit in row[:length][::-1])
        answer[: len(text)] = [FIRST_LETTER + LETTERS.index(letter) for letter in text]
    return (digits + FIRST_DIGIT).astype(np.int32), lengths, answers


def _is_held_out(digits: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns [count]: True for an eighth of the sources [count, DIGITS] of three or more digits.

    Shorter sources are never held out: from single digits a model learns the digits' names.
    """
    seen = np.arange(DIGITS)[None] < lengths[:, None]
    numbers = np.sum(np.where(seen, digits + 1, 0) * 11 ** np.arange(DIGITS), axis=1)
    return ((numbers * 2_654_435_761 >> 7) % 8 == 0) & (lengths >= 3)


def train(kind: str, seed: int, steps: int) -> dict:
    """Trains one model; returns its held-out accuracy by step, and the step that reaches RIGHT."""
    config = config_of(kind)
    model = EncoderDecoder(config, jax.random.key(seed))
    graph, params = nnx.split(model)
    warm_up = min(50, steps // 10)
    schedule = optax.join_schedules(
        [optax.linear_schedule(0, 2e-3, warm_up), optax.linear_schedule(2e-3, 0, steps - warm_up)],
        [warm_up],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    def loss(params, source, lengths, answers):
        previous = jnp.pad(answers[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)
        z_BTV = nnx.merge(graph, params)(source, lengths, previous)
        nats_BT = optax.softmax_cross_entropy_with_integer_labels(z_BTV, answers)
        # The loss counts letters and the first END.
        first_BT = jnp.cumsum(answers == END, axis=1) <= 1
        return jnp.sum(nats_BT * first_BT) / jnp.sum(first_BT)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def answer(params, source, lengths):
        model = nnx.merge(graph, params)
        return greedy(model, model.remember(source, lengths, ANSWER), BEGIN, ANSWER)

    state = optimizer.init(params)
    rng, others = np.random.default_rng(seed), np.random.default_rng(10**6)
    held_out = questions(others, HELD_OUT, held_out=True)
    curve = {}
    for at_step in range(1, steps + 1):
        params, state, value = step(params, state, *questions(rng, BATCH))
        if at_step % EVERY and at_step < steps:
            continue
        decoded = np.asarray(answer(params, *held_out[:2]))
        curve[at_step] = dict(loss=float(value), right=right(decoded, held_out[2]))
        if not np.isfinite(curve[at_step]["loss"]):
            raise FloatingPointError(f"the loss is no number at step {at_step}")
    entry = config.cross.entry().values()
    return dict(
        steps=next((s for s, point in curve.items() if point["right"] >= RIGHT), None),
        right=curve[steps]["right"],
        curve=curve,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        cached_bytes=sum(4 * int(np.prod(field.shape)) for field in entry),
    )


def right(decoded: np.ndarray, answers: np.ndarray) -> float:
    """Returns the share of answers that are right up to their first END."""
    counted = np.cumsum(answers == END, axis=1) <= 1
    return float(np.mean(np.all((decoded == answers) | ~counted, axis=1)))


def cell(kind: str, steps: int) -> Cell:
    return Cell(
        name=f"{kind}_steps{steps}",
        settings=dict(kind=kind, steps=steps, digits=DIGITS, batch=BATCH, rank=RANK),
        train=lambda seed: train(kind, seed, steps),
    )


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns figures per kind over its seeds; steps are over the runs that reached RIGHT."""
    table = []
    for cell in cells:
        runs = list(in_process.runs_of(cell, finished).values())
        if not runs:
            continue
        steps = [run["steps"] for run in runs if run["steps"]]
        row = dict(kind=cell.settings["kind"], runs=len(runs), became_right=len(steps))
        row |= {key: runs[0][key] for key in ("parameters", "cached_bytes")}
        row |= estimated("steps", estimate(steps) if steps else None)
        table.append(row | estimated("right", estimate([run["right"] for run in runs])))
    return table


_HEADER = ("cross-attention", "parameters", "bytes per source token and layer (float32)")
_HEADER += ("99 % right, of runs", "steps until then", "held-out answers right, %")


def _cells(r: Mapping) -> tuple:
    solved = f"{r['became_right']} of {r['runs']}"
    sizes = (f"{r['parameters']:,}", f"{r['cached_bytes']:,}")
    return r["kind"], *sizes, solved, shown(r, "steps", ",.0f"), shown(r, "right", ".1f", 100)


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.names("kinds", KINDS)
    parser.count("steps", 2500, "training steps of 64 answers (2500)")
    options = parser.parse(arguments)
    all_cells = [cell(kind, options.steps) for kind in KINDS]
    cells = [c for c in all_cells if c.settings["kind"] in options.kinds]

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(steps=options.steps, rows=rows(all_cells, finished))

    how = dict(code_files=(__file__,), only=dict(kind=options.kinds))
    return in_process.study(NAME, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
