"""Results of one model, for tables and plots."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import re

from experiments.conversion import records
from kvjax.foundation.intervals import estimate

SUBJECTS = dict(whisper="Whisper tiny.en's decoder", smollm2="SmolLM2-135M")
_LEARN = dict(qk="queries and keys", qkv="queries, keys and values")
CONTROL = "control"


def relative(perplexity: float, base: float) -> float:
    """Returns the relative increase over `base`."""
    return perplexity / base - 1


def percent(share: float) -> str:
    """Returns a relative change as text, with one decimal below 100 %."""
    return f"{100 * share:+,.{1 if abs(share) < 1 else 0}f} %"


def variant_label(variant: str) -> str:
    """Returns a variant's name in words."""
    if variant == "control":
        return "none (the control)"
    kind, rank = re.fullmatch(r"(.*)_r(\d+)", variant).groups()
    kinds = {
        "thin": "thin keys, rank {}",
        "lrkv": "LRKV, rank {}",
        "thin_joint": "thin keys, one latent of rank {}",
        "thin_query": "queries alone, rank {}, tuned at full rank",
        "thin_both": "thin keys and queries, rank {}, tuned at full rank",
        "thin_as_lrkv": "thin keys, bytes of LRKV {}",
        "thin_kv_as_lrkv": "thin keys and values, bytes of LRKV {}",
        "thin_kv_joint_as_lrkv": "one latent of keys, one of values, bytes of LRKV {}",
    }
    return kinds[kind].format(rank)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The tuned runs of one conversion in one setting.

    Attributes:
      before: perplexity before tuning.
      after: perplexity after tuning, by seed.
      control: perplexity after tuning without conversion, by seed.
    """

    name: str
    cached: int
    share: float
    before: float
    after: Mapping[int, float]
    control: Mapping[int, float]

    def half_interval(self) -> float | None:
        return estimate(list(self.after.values())).half

    def against_control(self) -> tuple[float, float | None] | None:
        """Returns the mean relative change by seed and half its interval; None for the control."""
        seeds = [seed for seed in self.after if seed in self.control]
        if self.name == CONTROL or not seeds:
            return None
        changes = [relative(self.after[seed], self.control[seed]) for seed in seeds]
        change = estimate(changes)
        return change.mean, change.half


@dataclasses.dataclass(frozen=True)
class TuningSetting:
    """Runs of one tuning recipe, the control first."""

    label: str
    variants: Sequence[Tuned]


class Outcomes:
    """The results of one model.

    Args:
      name: a key of SUBJECTS.
    """

    def __init__(self, name: str):
        self.name, self.title = name, SUBJECTS[name]

    @functools.cached_property
    def before(self) -> dict[str, dict]:
        """Returns the results before tuning by name: curves, and "original"."""
        results = records.in_folder(f"{self.name}/before")
        return {name.rpartition("/")[2]: result for name, result in results.items()}

    @property
    def original(self) -> dict | None:
        return self.before.get("original")

    @property
    def whole_rank(self) -> int:
        """Returns the full rank, in the tables' unit."""
        head, heads = self.original["head_dim"], self.original["num_heads"]
        return head * heads if self.name == "whisper" else head

    @property
    def rank(self) -> str:
        """Returns the header of a column of ranks."""
        return f"rank of {self.whole_rank}" + (" per head" if self.name != "whisper" else "")

    @property
    def note(self) -> str:
        """Returns a sentence with the perplexity before conversion."""
        settings = self.original["settings"]
        rows = settings.get("validation_rows", 0)
        tokens = settings.get("validation_tokens") or rows * settings["row_length"]
        perplexity = self.original["perplexity"]
        return f"Perplexity of {tokens:,} held-out tokens; before conversion {perplexity:.4g}."

    def curve(self, name: str) -> dict | None:
        return self.before.get(name)

    def settings(self) -> list[TuningSetting]:
        """Returns the tuning settings, most runs first."""
        groups: dict[str, dict[str, dict]] = {}
        for name, result in records.in_folder(f"{self.name}/after").items():
            *_, folder, run = name.split("/")
            groups.setdefault(folder, {})[run] = result
        ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        return [_setting(list(runs.values())) for _, runs in ordered]


def _setting(runs: Sequence[dict]) -> TuningSetting:
    by_variant: dict[str, list[dict]] = {}
    for run in runs:
        by_variant.setdefault(run["settings"]["variant"], []).append(run)
    control = _by_seed(by_variant.get(CONTROL, ()))
    tuned = [
        Tuned(
            name=name,
            cached=variant_runs[0]["cached"],
            share=variant_runs[0]["share"],
            before=variant_runs[0]["before"],
            after=_by_seed(variant_runs),
            control=control,
        )
        for name, variant_runs in by_variant.items()
    ]
    tuned.sort(key=lambda v: (v.name != CONTROL, re.sub(r"_r\d+$", "", v.name), -v.share))
    s = runs[0]["settings"]
    share = s.get("teacher_share", 0.0)
    learns = f"text and the original's predictions ({share:g} of the loss)" if share else "text"
    tokens = s["steps"] * s["batch"] * s["row_length"]
    label = f"{_LEARN[s['tune']]} trained on {learns}, {tokens:,} tokens, rate {s['rate']:g}"
    return TuningSetting(label, tuned)


def _by_seed(runs: Sequence[dict]) -> dict[int, float]:
    return dict(sorted((run["settings"]["seed"], run["after"]) for run in runs))
