"""The mixture of conversations that a run trains on: published sets and the user's, as in nanochat.

    config.mixture.smoltalk = "~/data/smol-smoltalk/data/train-*.parquet"
    config.mixture.validation_mmlu = "~/data/mmlu/all/test-*.parquet#0:5200"

The key determines how rows are read (see `conversation.questions`).
"""

from collections.abc import Sequence
import dataclasses
import random
import re
from typing import NamedTuple

import numpy as np

from kvjax.data import config as config_lib
from kvjax.data.manifest import SPLITS
from kvjax.foundation import runtime
from kvjax.foundation.configuration import between, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.text import check_text
from kvjax.published import hub

LIMIT = 2048  # maximum tokens of a conversation
KINDS = ("smoltalk", "mmlu", "gsm8k", "arc", "conversations")
LOSSES = ("all", "assistant")
PACKS = ("stream", "whole", "single")
_ROWS = re.compile(r"(.*)#(\d*):(\d*)")


class SetSpec(NamedTuple):
    """One set of a mixture."""

    split: str
    kind: str  # one of KINDS
    key: str  # a key of config.mixture
    source: str  # a file, folder, glob or tfds:NAME
    start: int = 0  # first row of the range, after shuffling
    stop: int | None = None

    @property
    def where(self) -> str:
        """The config key and value of this set, for messages."""
        rows = f"#{self.start}:{'' if self.stop is None else self.stop}"
        whole = not self.start and self.stop is None
        return f"config.mixture.{self.key} = {self.source + ('' if whole else rows)!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Sets of conversations, each shuffled, then mixed and packed into rows.

    A value lists sets, separated by commas; empty: no set of that kind. A set is a file, folder or
    glob (JSON lines as in config.data, .parquet, .csv), or tfds:NAME#SPLIT. #START:STOP after it
    selects a range of its shuffled rows. `conversations` may also be "embedded": 500 synthetic
    conversations.
    """

    smoltalk: str = ""  # rows with `messages`, as SmolTalk has them
    mmlu: str = ""  # question, choices, answer; the original's CSV too
    gsm8k: str = ""  # question, answer with <<calls>> of the calculator
    arc: str = ""  # question, choices, answerKey
    conversations: str = ""  # your own: one {"messages": [{"role", "content"}, ...]} per line
    validation_smoltalk: str = ""  # the same for validation
    validation_mmlu: str = ""  # the same for validation
    validation_gsm8k: str = ""  # the same for validation
    validation_arc: str = ""  # the same for validation
    validation_conversations: str = ""  # the same for validation
    order: tuple[str, ...] = KINDS  # order of the sets before they are mixed
    seed: int = 42  # seed of the shuffles
    limit: int = LIMIT  # maximum tokens of a conversation; longer ones lose their end
    loss: str = "all"  # targets of the loss: "all" tokens, or the "assistant"'s messages
    # "stream": concatenated and cut at row ends. "whole": as many whole conversations as fit in a
    # row. "single": one per row. With the last two, rows are padded; padding has loss 0.
    pack: str = "stream"
    skip_broken: bool = False  # skip and list rows that are not conversations

    def __post_init__(self):
        for key in _keys():
            check_text(f"config.mixture.{key}", getattr(self, key))
            for item in config_lib.split_source(getattr(self, key)):
                source, *_ = _parsed(key, item)
                if hub.is_name(source):
                    hub.parse(f"config.mixture.{key}", source, kind="dataset")
                elif not source.startswith("tfds:"):
                    runtime.path(f"config.mixture.{key}", source)
        between("config.mixture.seed", self.seed, 0, (1 << 32) - 1)
        between("config.mixture.limit", self.limit, 2, config_lib.MAX_SEQUENCE_LENGTH)
        one_of("config.mixture.loss", self.loss, LOSSES)
        one_of("config.mixture.pack", self.pack, PACKS)
        if sorted(self.order) != sorted(KINDS):
            raise UserError(
                f"config.mixture.order = {self.order!r}: must name each of {', '.join(KINDS)} once"
            )
        for split in SPLITS:
            if not self.specs(split):
                keys = ", ".join(_key(split, kind) for kind in KINDS)
                raise UserError(
                    f"config.mixture: has no conversations for {split}: set one of {keys}"
                )

    @property
    def is_masked(self) -> bool:
        """True if some targets do not count in the loss."""
        return self.loss != "all" or self.pack != "stream"

    def specs(self, split: str) -> list[SetSpec]:
        """Returns the sets of `train` or `validation`, in order."""
        keys = [(kind, _key(split, kind)) for kind in self.order]
        return [
            SetSpec(split, kind, key, *_parsed(key, item))
            for kind, key in keys
            for item in config_lib.split_source(getattr(self, key))
        ]


def _key(split: str, kind: str) -> str:
    return kind if split == "train" else f"{split}_{kind}"


def _keys() -> list[str]:
    return [_key(split, kind) for split in SPLITS for kind in KINDS]


def _parsed(key: str, item: str) -> tuple[str, int, int | None]:
    """Splits SOURCE#START:STOP."""
    match = _ROWS.fullmatch(item)
    if not match:
        return item, 0, None
    source, start, stop = match[1], int(match[2] or 0), int(match[3]) if match[3] else None
    if not source or (stop is not None and stop <= start):
        raise UserError(
            f"config.mixture.{key} = {item!r}: must be SOURCE#START:STOP with START below STOP; "
            "either may be omitted"
        )
    return source, start, stop


def shuffled(count: int, seed: int) -> np.ndarray:
    """Returns the row order of Hugging Face's `shuffle(seed)`, int64."""
    return np.random.default_rng(seed).permutation(count)


def mixed(counts: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """Returns (set, index of a row) for all rows, shuffled as by nanochat's TaskMixture."""
    pairs = [(i, index) for i, count in enumerate(counts) for index in range(count)]
    random.Random(seed).shuffle(pairs)
    return pairs
