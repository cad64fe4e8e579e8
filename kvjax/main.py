"""`python -m kvjax.main --config=configs/lrkv_tiny.py`: trains what a config describes.

Keys are overridden as `--config.train.num_steps=100`. Running the same command again resumes.
On several hosts the same command runs on each; on a TPU pod and under Slurm the processes find each
other, elsewhere --coordinator, --num_processes and --process_id (or KVJAX_COORDINATOR and so on)
tell them. Exit statuses: `kvjax.distributed`.
"""

import functools
import pathlib
import sys

from absl import app
from absl import flags
from etils import epath
from ml_collections import config_flags

from kvjax import command_line
from kvjax import distributed
from kvjax import runtime
from kvjax.errors import UserError

_DEFAULT = pathlib.Path(__file__).parents[1] / "configs" / "lrkv_tiny.py"
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Checkpoints and metrics go here, local or gs://; empty: runs/<config's name>."
)
_JOB = dict(
    coordinator=flags.DEFINE_string(
        "coordinator", None, "Of several processes: process 0's host:port. Or KVJAX_COORDINATOR."
    ),
    num_processes=flags.DEFINE_integer(
        "num_processes", None, "How many processes there are. Or KVJAX_NUM_PROCESSES."
    ),
    process_id=flags.DEFINE_integer(
        "process_id", None, "Which one this is, from 0. Or KVJAX_PROCESS_ID."
    ),
    connect_seconds=flags.DEFINE_integer(
        "connect_seconds", 300, "How long processes wait for each other.", lower_bound=1
    ),
    heartbeat_seconds=flags.DEFINE_integer(
        "heartbeat_seconds", 100, "After so long a silent process is lost.", lower_bound=1
    ),
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}: options start with --")
    runtime.start()
    config = _CONFIG.value
    workdir = epath.Path(_WORKDIR.value or f"runs/{config.name}").expanduser()
    try:
        distributed.start(**{name: flag.value for name, flag in _JOB.items()})
        from kvjax import train  # after the runtime is set up

        with distributed.ending_together():
            train.train(config, workdir)
    except (UserError, OSError) as error:
        print(f"kvjax: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, default=_DEFAULT))
