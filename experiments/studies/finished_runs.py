"""The figures of a study's finished runs: stored in the study's result, so that it can resume."""

from collections.abc import Iterable, Mapping
import fcntl
import json
import os
import pathlib
from typing import IO

from etils import epath

from experiments.studies import code as code_lib
from kvjax.foundation import json_text
from kvjax.foundation.errors import UserError

_CLAIMED: dict[pathlib.Path, IO] = {}  # locks, released when the process ends


def claim(file: pathlib.Path) -> None:
    """Locks a result for this process; call it before reading a result that will be written.

    Raises:
      UserError: another process writes it; each would overwrite the other's runs.
    """
    file = file.resolve()
    if file in _CLAIMED:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = open(file.parent / f".{file.name}.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(
            f"--save: another process writes {os.path.relpath(file)}: wait until it has ended, or "
            "leave out --save"
        ) from error
    _CLAIMED[file] = lock


class FinishedRuns:
    """Finished runs, by cell and seed.

    Attributes:
      runs: {cell: {seed: figures, with the identity of the settings and the digest of the code}}.
      codes: {digest: files}, of all runs.

    Raises:
      UserError: the result is damaged, or has other settings, or its runs were trained by other
        code and `mix` is false.
    """

    def __init__(
        self,
        file: pathlib.Path,
        settings: Mapping[str, object],
        code: Mapping[str, str],
        *,
        mix: bool,
        fresh: bool,
    ):
        """Reads the result, if there is one.

        Args:
          settings: options that all runs share, such as {"steps": 256}.
          code: digests of the current code, see `code_of`.
        """
        self.settings, self._file = dict(settings), file
        self.runs: dict[str, dict[int, dict]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        if fresh or not file.exists():
            return
        advice = "move it away, or give --fresh to begin a new result"
        saved = json_text.read_object(epath.Path(file), advice)
        missing = [key for key in (*settings, "runs", "codes") if key not in saved]
        shown = os.path.relpath(file)
        if missing:
            raise UserError(f"{shown} lacks {missing[0]!r}: {advice}")
        for key, value in settings.items():
            if saved[key] != value:
                raise UserError(
                    f"--{key} = {value}: {shown} has runs of {saved[key]} {key}; give that, or "
                    "--fresh to begin a new result"
                )
        self.codes = saved["codes"]
        changes = (code_lib.changed(digests, code) for digests in self.codes.values())
        files = sorted({name for digests in changes for name in digests})
        if files and not mix:
            raise UserError(
                f"{shown} has runs of other code ({code_lib.in_short(files)}). "
                "--fresh trains all anew (with another --runs, if the study has it; --save then "
                "overwrites them), and --mix accepts them if the change affects no number"
            )
        for name, seeds in saved["runs"].items():
            self.runs[name] = {int(seed): figures for seed, figures in seeds.items()}

    def found(self, cell: str, seed: int, identity: str) -> dict | None:
        """Returns a run's figures; None for a missing run or one with other settings."""
        figures = self.runs.get(cell, {}).get(seed)
        return figures if figures and figures["identity"] == identity else None

    def check(self, runs: Iterable[tuple[str, int, str]]) -> None:
        """Raises a UserError if a finished run with other settings would be overwritten.

        Args:
          runs: cells, seeds and identities.
        """
        for cell, seed, identity in runs:
            figures = self.runs.get(cell, {}).get(seed)
            if figures and figures["identity"] != identity:
                raise UserError(
                    f"--save: {os.path.relpath(self._file)} has {cell}, seed {seed}, of other "
                    "options or data: give those, leave out --save, or give --fresh to begin a "
                    "new result"
                )

    def put(
        self,
        cell: str,
        seed: int,
        identity: str,
        code: Mapping[str, str],
        origin: Mapping,
        **figures,
    ) -> None:
        """Records a run's figures.

        Args:
          identity: digest of the settings.
          origin: the run's provenance (data and machine).
        """
        digest = code_lib.digest(json.dumps(code, sort_keys=True))
        self.codes[digest] = dict(code)
        entry = dict(origin) | dict(identity=identity, code=digest) | figures
        self.runs.setdefault(cell, {})[seed] = entry

    def as_json(self) -> dict:
        return self.settings | dict(codes=self.codes, runs=self.runs)
