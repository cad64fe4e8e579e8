"""Records of a run: metrics.jsonl, timing.jsonl and curves.png. Trackers get the records too.

metrics.jsonl is a function of config and data alone, so that a run that was killed and resumed
writes the same bytes as an uninterrupted one. Times go to timing.jsonl. Every record ends with its
checksum (`json_text.with_checksum`), except in older workdirs.
"""

from collections.abc import Mapping, Sequence
import contextlib
import errno
import io
import json
import os
import pathlib
import tempfile
import time
import warnings

from etils import epath
import numpy as np

from kvjax.foundation import json_text, theme
from kvjax.foundation.errors import first_line, warn
from kvjax.foundation.files import in_bucket, unused
from kvjax.hardware import datasheets
from kvjax.workdir import trackers as trackers_lib

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"


class JsonLines:
    """A tracker that appends to a .jsonl file, after dropping records beyond `resume_step`.

    A file with damaged lines is set aside; a new file starts with its valid records. Unlike errors
    of other trackers, errors of this one end the run.

    Args:
      path: the file, on this machine.
      before: the file that an earlier process left, perhaps in a bucket.
    """

    def __init__(self, path: pathlib.Path, before: epath.Path, *, resume_step: int):
        records, broken = read_checked(before)
        if broken:
            _set_aside(before, broken)
        text = "".join(_line(record) for record in records if record["step"] <= resume_step)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(path)  # atomic: a kill leaves the old or the new file
        self.path, self._file = path, open(path, "ab+", buffering=0)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Appends a record.

        Raises:
          OSError: the disk is full.
        """
        line = _line({"step": step, **record}).encode()
        if self._file.write(line) != len(line):  # unbuffered writes may be short
            raise OSError(errno.ENOSPC, f"no room for a record in {self.path}")

    def check(self) -> None:
        """Raises an OSError if the file was moved or removed."""
        opened = os.fstat(self._file.fileno())
        if not (self.path.exists() and os.path.samestat(self.path.stat(), opened)):
            rescued = _rescue(self.path, self._file)
            raise OSError(f"{self.path} was moved or removed during the run{rescued}")

    def close(self) -> None:
        self._file.close()


class MetricsWriter:
    """Writes the records of a run to metrics.jsonl, timing.jsonl and trackers.

    Files are written locally. If the workdir is in a bucket, `flush` copies them there.

    Attributes:
      folder: local folder of the files.
    """

    def __init__(
        self,
        workdir: epath.Path,
        *,
        resume_step: int,
        trackers: Sequence[str | trackers_lib.Tracker] = trackers_lib.DEFAULT,
    ):
        self._remote = workdir if in_bucket(workdir) else None
        self._local = pathlib.Path(tempfile.mkdtemp() if self._remote else workdir)
        self.folder = epath.Path(self._local)
        self._files = {
            name: JsonLines(self._local / name, workdir / name, resume_step=resume_step)
            for name in (METRICS, TIMING)
        }
        self._trackers = trackers_lib.Trackers(
            trackers, self._local, workdir, resume_step=resume_step
        )

    def write(self, step: int, **values: float) -> None:
        """Appends a record of values that config and data determine."""
        self._append(METRICS, step, values)

    def write_timing(self, step: int, **values: float) -> None:
        """Appends a record of values that depend on the machine."""
        self._append(TIMING, step, values)

    def _append(self, name: str, step: int, record: dict[str, float]) -> None:
        self._files[name].write(step, record)
        self._trackers.write(step, record)

    def flush(self) -> None:
        """Copies all files to the bucket, if any; a failure is only a warning.

        Raises:
          OSError: a file was moved or removed.
        """
        for file in self._files.values():
            file.check()
        if failure := self._copy():
            warn(
                f"records were not copied to {self._remote}: {failure}; they are in {self._local}, "
                "and the next checkpoint copies them again"
            )

    def close(self) -> None:
        try:
            for file in self._files.values():
                file.close()
            self._trackers.close()
        finally:
            if self._copy() and (failure := self._copy()):  # a second try: no flush follows
                warn(
                    f"THE RECORDS OF THIS RUN WERE NOT COPIED to {self._remote}: {failure}. They "
                    f"are in {self._local} on this machine: copy them before they are lost"
                )

    def _copy(self) -> str:
        """Copies all files to the bucket, if any; returns the failure, or ""."""
        if self._remote is None:
            return ""
        try:
            for path in self._local.rglob("*"):
                if path.is_file():
                    target = self._remote / str(path.relative_to(self._local))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
        except Exception as error:  # bucket clients raise types of their own
            return f"{type(error).__name__}: {first_line(error)}"
        return ""


class NullWriter:
    """Stands in for `MetricsWriter` on all processes but the first, and writes nothing."""

    folder = None

    def write(self, step: int, **values: float) -> None:
        pass

    write_timing = write

    def flush(self) -> None:
        pass

    close = flush


class Clock:
    """Measures the durations of steps, without pauses and without the first step.

    Args:
      tokens_per_step: tokens per step over all devices.
      flops_per_token: `costs.formulas.training_flops_per_token`, without recomputation.
      num_devices: number of devices of the job, all of one kind.
      local_devices: devices of this process, the only ones whose memory statistics it can read.
    """

    def __init__(
        self, *, tokens_per_step: int, flops_per_token: float, num_devices: int, local_devices: list
    ):
        self.steps = 0
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._num_devices, self._local_devices = num_devices, local_devices
        self._since = self._now = self._paused = 0.0
        self._recent: list[float] = []  # seconds of each step since the last lap

    def tick(self) -> None:
        """Records the end of a step."""
        before, self._now = self._now, time.monotonic()
        if self.steps == 0:
            self._since = self._now
        else:
            self._recent.append(self._now - before - self._paused)
        self._paused = 0.0
        self.steps += 1

    @contextlib.contextmanager
    def paused(self):
        """Excludes the time of the block, such as an evaluation."""
        before = time.monotonic()
        yield
        paused = time.monotonic() - before
        self._paused += paused
        self._since += paused

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices since the first step."""
        elapsed = self._now - self._since
        return (self.steps - 1) * self._tokens_per_step / elapsed if elapsed > 0 else 0.0

    def lap(self) -> dict[str, float]:
        """Returns a record for timing.jsonl of the steps since the last lap; {} if there are none.

        The record has tokens_per_second since the first step (in total and per device); the 50 and
        90 % quantiles and the maximum of the lap's step_seconds; for known devices mfu, relative to
        the datasheet's dense bfloat16 peak; and, if devices report it, hbm_peak_bytes, the maximum
        over this process's devices since its start.
        """
        seconds, self._recent = self._recent, []
        if not seconds:
            return {}
        record = {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self._num_devices,
            "step_seconds_p50": float(np.percentile(seconds, 50)),
            "step_seconds_p90": float(np.percentile(seconds, 90)),
            "step_seconds_max": max(seconds),
        }
        if device := datasheets.for_device(self._local_devices[0]):
            flops = self._tokens_per_step * self._flops_per_token / float(np.mean(seconds))
            record["mfu"] = flops / (self._num_devices * device.bf16_flops)
        peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in self._local_devices]
        if all(peaks):
            record["hbm_peak_bytes"] = max(peaks)
        return record


def _rescue(path: pathlib.Path, file: io.FileIO) -> str:
    """Saves a deleted file's content under another name; returns text for the error message.

    Args:
      path: former path of the file.
    """
    if os.fstat(file.fileno()).st_nlink:  # moved, not deleted
        return ""
    file.seek(0)
    target = unused(epath.Path(path.parent / f"replaced-{path.name}"))
    target.write_bytes(file.read())
    return f"; its records are in {target}: rename this file to {path.name} to go on with them"


def _line(record: dict) -> str:
    return json.dumps(json_text.with_checksum(record)) + "\n"


def read_records(path: epath.Path) -> list[dict]:
    """Returns the valid records of a .jsonl file; [] if there is no file.

    A valid record has a step, and only numbers. A partial last line, which a killed run may leave,
    is skipped.
    """
    return read_checked(path)[0]


def read_checked(path: epath.Path) -> tuple[list[dict], str]:
    """Returns the records of `read_records`, and a description of the first invalid line or "".

    A partial last line is not invalid; a complete record with a damaged line end is.
    """
    content = path.read_bytes() if path.exists() else b""
    records, broken = [], ""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif not broken and (number < len(lines) or _record(line[:-1]) is not None):
            broken = f"line {number} is no record: {line[:40]!r}"
    return records, broken


def _record(line: bytes) -> dict | None:
    try:
        record = json_text.parse(line)
        record = json_text.without_checksum(record) if isinstance(record, dict) else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    numbers = [type(value) in (int, float) for value in record.values()]  # bool is no number
    return record if all(numbers) else None


def _set_aside(path: epath.Path, why: str) -> None:
    target = unused(path.parent / f"unreadable-{path.name}")
    target.write_bytes(path.read_bytes())
    warn(f"{path}: {why}. The file was kept as {target}; a new {path.name} has its valid records")


def draw_curves(
    workdir: epath.Path,
    *,
    title: str,
    yardstick: float | None,
    mechanism: str = "",
    folder: epath.Path | None = None,
) -> epath.Path:
    """Draws training loss and validation bits per byte against tokens to curves.png.

    Args:
      mechanism: key of `theme.COLORS` for the curves, see `attention.family`.
      folder: folder of metrics.jsonl; None: the workdir.
      yardstick: bits per byte of `xz -9e` on the validation text, drawn as a line.
    """
    # Not pyplot, whose backend belongs to the caller.
    from matplotlib import figure as figures, ticker

    records = read_records((folder or workdir) / METRICS)

    def series(key: str):
        points = [(r["tokens"], r[key]) for r in records if key in r and "tokens" in r]
        return zip(*points, strict=True)

    picture, path = io.BytesIO(), workdir / "curves.png"
    style = dict(color=theme.COLORS.get(mechanism, theme.SERIES[0]))
    with theme.styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = figures.Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(*series("loss"), linewidth=1.2, **style)
        left.set(xlabel="tokens", ylabel="training loss (nats per token)", yscale="log")
        left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(ticker.NullFormatter())
        evaluated = list(series("validation_bpb"))
        if evaluated:
            count = len(evaluated[0])
            right.plot(*evaluated, marker="o", markevery=max(1, count // 20), **style)
            tokens, bpb = (x[-1] for x in evaluated)
            offset = dict(xytext=(0, 9), textcoords="offset points", ha="right")
            right.annotate(f"{bpb:.3f}", (tokens, bpb), **offset)
        if yardstick is not None:
            right.axhline(yardstick, color=theme.GRAY, linestyle="--", linewidth=1.2)
            label = dict(transform=right.get_yaxis_transform(), ha="right", color=theme.GRAY)
            right.text(0.99, yardstick, f"xz -9e: {yardstick:.3f}", va="bottom", **label)
        right.set(xlabel="tokens", ylabel="validation bits per byte")
        for axes in (left, right):
            axes.grid()
            axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 50k, 1.5M
        figure.suptitle(title, weight="bold")
        figure.savefig(picture, format="png", dpi=120)
    path.write_bytes(picture.getvalue())
    return path
