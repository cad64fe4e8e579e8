"""`python -m kvjax.main --config=configs/lrkv_tiny.py`: trains what a config describes.

Keys are overridden as `--config.train.num_steps=100`. Running the same command again resumes.
"""

import functools
import pathlib
import sys

from absl import app
from absl import flags
from etils import epath
from ml_collections import config_flags

from kvjax import command_line
from kvjax import runtime
from kvjax.errors import UserError

_DEFAULT = pathlib.Path(__file__).parents[1] / "configs" / "lrkv_tiny.py"
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Checkpoints and metrics go here, local or gs://; empty: runs/<config's name>."
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}: options start with --")
    runtime.start()
    from kvjax import train  # after the runtime is set up

    config = _CONFIG.value
    workdir = epath.Path(_WORKDIR.value or f"runs/{config.name}").expanduser()
    try:
        train.train(config, workdir)
    except (UserError, OSError) as error:
        print(f"kvjax: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, default=_DEFAULT))
