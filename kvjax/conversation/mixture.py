"""Which conversations a run trains on: published sets and own ones, in nanochat's order.

    config.mixture.smoltalk = "~/data/smol-smoltalk/data/train-*.parquet"
    config.mixture.validation_mmlu = "~/data/mmlu/all/test-*.parquet#0:5200"

Each key names its kind of rows (`conversation.questions` reads them).
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

LIMIT = 2048  # tokens that a conversation is cut to
KINDS = ("smoltalk", "mmlu", "gsm8k", "arc", "conversations")
LOSSES = ("all", "assistant")
PACKS = ("stream", "whole", "single")
_ROWS = re.compile(r"(.*)#(\d*):(\d*)")


class SetSpec(NamedTuple):
    """One set of a mixture."""

    split: str
    kind: str  # one of KINDS
    key: str  # of config.mixture
    source: str  # a file, folder, glob or tfds:NAME
    start: int = 0  # of its rows, once they are shuffled
    stop: int | None = None

    @property
    def where(self) -> str:
        """The config's key and value that name this set, for messages."""
        rows = f"#{self.start}:{'' if self.stop is None else self.stop}"
        whole = not self.start and self.stop is None
        return f"config.mixture.{self.key} = {self.source + ('' if whole else rows)!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Sets of conversations, each shuffled, mixed and packed into rows.

    A value is comma-separated; each part of it is a set: a file, folder or glob (JSON lines as
    config.data has them, .parquet, .csv), or tfds:NAME#SPLIT, and behind it #START:STOP where not
    all of its rows, as they are shuffled, are wanted. Empty: none of that kind. `conversations` may
    also be "embedded", 500 that are made up.
    """

    smoltalk: str = ""  # rows with `messages`, as SmolTalk has them
    mmlu: str = ""  # question, choices, answer; the original's CSV too
    gsm8k: str = ""  # question, answer with <<calls>> of the calculator
    arc: str = ""  # question, choices, answerKey
    conversations: str = ""  # your own: {"messages": [{"role", "content"}, ...]} a line
    validation_smoltalk: str = ""  # the same for validation
    validation_mmlu: str = ""  # the same for validation
    validation_gsm8k: str = ""  # the same for validation
    validation_arc: str = ""  # the same for validation
    validation_conversations: str = ""  # the same for validation
    order: tuple[str, ...] = KINDS  # in which sets are laid side by side before they are mixed
    seed: int = 42  # of the shuffles
    limit: int = LIMIT  # tokens that a conversation is cut to, at its end
    loss: str = "all"  # targets that count: "all", or what the "assistant" says
    # "stream": one after the other, cut where a row ends. "whole": as many whole ones as fit in a
    # row. "single": one a row. Of the last two what is left of a row is filled and does not count.
    pack: str = "stream"
    skip_broken: bool = False  # leave out rows that are no conversation, and list them

    def __post_init__(self):
        for key in _keys():
            check_text(f"config.mixture.{key}", getattr(self, key))
            for item in config_lib.split_source(getattr(self, key)):
                source, *_ = _parsed(key, item)
                if not source.startswith("tfds:"):
                    runtime.path(f"config.mixture.{key}", source)
        at = lambda key: (f"config.mixture.{key}", getattr(self, key))
        between(*at("seed"), 0, (1 << 32) - 1)
        between(*at("limit"), 2, config_lib.MAX_SEQUENCE_LENGTH)
        one_of(*at("loss"), LOSSES)
        one_of(*at("pack"), PACKS)
        if sorted(self.order) != sorted(KINDS):
            raise UserError(
                f"config.mixture.order = {self.order!r}: must name each of {', '.join(KINDS)} once"
            )
        for split in SPLITS:
            if not self.specs(split):
                keys = ", ".join(_key(split, kind) for kind in KINDS)
                raise UserError(
                    f"config.mixture: names no conversations for {split}: give one of {keys}"
                )

    @property
    def is_masked(self) -> bool:
        """Whether some targets do not count."""
        return self.loss != "all" or self.pack != "stream"

    def specs(self, split: str) -> list[SetSpec]:
        """The sets of `train` or `validation`, in order."""
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
    """A source, and the range of its rows."""
    found = _ROWS.fullmatch(item)
    if not found:
        return item, 0, None
    source, start, stop = found[1], int(found[2] or 0), int(found[3]) if found[3] else None
    if not source or (stop is not None and stop <= start):
        raise UserError(
            f"config.mixture.{key} = {item!r}: must be SOURCE#START:STOP with START below STOP; "
            "either may be left out"
        )
    return source, start, stop


def shuffled(count: int, seed: int) -> np.ndarray:
    """The rows of a set in the order that Hugging Face's `shuffle(seed)` gives them, int64."""
    return np.random.default_rng(seed).permutation(count)


def mixed(counts: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """All (set, place in it), shuffled as nanochat's TaskMixture does."""
    pairs = [(i, place) for i, count in enumerate(counts) for place in range(count)]
    random.Random(seed).shuffle(pairs)
    return pairs
