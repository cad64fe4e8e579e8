"""Trains the model that a config describes.

    python -m kvjax.main --config=configs/lrkv_tiny.py
    # a shorter run with another rank, in its own folder
    python -m kvjax.main --config=configs/lrkv_tiny.py --workdir=runs/rank_8 \\
        --config.train.num_steps=200 --config.attention.rank=8

The same command resumes a run. --config.SECTION.KEY=VALUE overrides a key of the config; all keys
are listed below. On several hosts, start the command on each. Exit statuses are in
configs/README.md, "How a run ends".
"""

from kvjax import distributed
from kvjax.data.config import PREPARE_HOURS
from kvjax.foundation import command_line, runtime
from kvjax.foundation.configuration import at_least, between
from kvjax.workdir import trackers

_JOB = ("coordinator", "num_processes", "process_id", "connect_seconds", "heartbeat_seconds")


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__, config=True)
    add = parser.add_argument_group("run").add_argument
    text = "folder that holds the run's checkpoints and metrics, local or gs:// (runs/NAME)"
    add("--workdir", default="", help=text)
    text = "refuse to start if preparing the data is estimated to take more hours than this "
    add("--prepare_hours", type=float, default=PREPARE_HOURS, help=f"{text}({PREPARE_HOURS:g})")
    text = (
        "who gets the records beside metrics.jsonl: tensorboard, wandb, tensorboard,wandb or none"
    )
    add("--trackers", default=",".join(trackers.DEFAULT), help=f"{text} (tensorboard)")
    text = "number of steps to trace, after the first three; the trace goes to WORKDIR/profile (0)"
    add("--profile_steps", type=int, default=0, help=text)
    job = parser.add_argument_group(
        "several processes",
        "On a TPU pod and under Slurm the processes find each other; elsewhere give the first "
        "three options to each process.",
    )
    add = job.add_argument
    add("--coordinator", help="host:port of process 0 (KVJAX_COORDINATOR)")
    add("--num_processes", type=int, help="number of processes (KVJAX_NUM_PROCESSES)")
    add("--process_id", type=int, help="index of this process, from 0 (KVJAX_PROCESS_ID)")
    text = "seconds to wait for the other processes at the start (300)"
    add("--connect_seconds", type=int, default=300, help=text)
    text = "seconds without a heartbeat after which a process counts as lost (100)"
    add("--heartbeat_seconds", type=int, default=100, help=text)
    return parser


def main(arguments: list[str]) -> None:
    """Trains; see the module's docstring."""
    parser = _parser()
    if "--help" in arguments or "-h" in arguments:
        from kvjax import config_help  # imports the model, so only for --help

        parser.epilog = config_help.text()
    options = parser.parse(arguments)
    at_least("--connect_seconds", options.connect_seconds, 1)
    at_least("--heartbeat_seconds", options.heartbeat_seconds, 1)
    between("--prepare_hours", options.prepare_hours, 0, 1e6)
    chosen = trackers.parse(options.trackers)
    config = command_line.load_config(options.config, options.overrides)
    runtime.start()
    workdir = options.workdir or f"runs/{config.get('name')}"
    distributed.start(**{name: getattr(options, name) for name in _JOB})
    from kvjax.training import loop  # after the runtime is set up

    with distributed.end_together():
        loop.train(
            config,
            workdir,
            prepare_hours=options.prepare_hours,
            trackers=chosen,
            profile_steps=options.profile_steps,
            seconds_before=runtime.seconds_since_launch(),
        )


if __name__ == "__main__":
    command_line.run(main)
