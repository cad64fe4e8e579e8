"""The training loop, which every process of a job runs in step with the others.

A run is a function of its config: on one machine the same config gives bit-identical metrics
(measured on CPU), even if the run was killed and resumed. The loop dispatches step n before it
reads the metrics of step n - 1, so that the device does not wait for the host.
"""

from collections.abc import Callable, Sequence
import contextlib
import math
import sys

from etils import epath
import jax
import ml_collections
import numpy as np

from kvjax import distributed
from kvjax.costs import formulas
from kvjax.data import loader
from kvjax.data.config import PREPARE_HOURS
from kvjax.distributed import sharding
from kvjax.foundation import progress, runtime
from kvjax.foundation.errors import UserError, warn
from kvjax.optim import learning_rate_schedule
from kvjax.training import ending, growth, preflight, profiling
from kvjax.training.goodput import STEPS, Goodput
from kvjax.training.program import Program
from kvjax.workdir import metrics as metrics_lib, trackers as trackers_lib
from kvjax.workdir.checkpoint import CHECKPOINTS, SNAPSHOTS, Checkpoints, read_parameters


def train(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    *,
    prepare_hours: float = PREPARE_HOURS,
    trackers: Sequence[str | trackers_lib.Tracker] = trackers_lib.DEFAULT,
    profile_steps: int = 0,
    seconds_before: float = 0.0,
) -> dict[str, float]:
    """Trains to the end or to `train.stop_after`; resumes from the workdir's checkpoint if any.

    Args:
      prepare_hours: most hours that preparing the data may take, by estimate.
      trackers: names ("tensorboard", "wandb") and objects that get the run's records.
      profile_steps: number of steps to trace, after the first `profiling.WARM_UP` ones.
      seconds_before: wall time already spent on startup, such as imports.

    Returns:
      The last validation record: step, tokens, validation_loss, validation_bpb.

    Raises:
      UserError: the config does not fit the workdir, the data or the machine (raised before
        anything expensive); a bad step (see `TrainConfig`) or a full disk, which leave checkpoints
        intact.
      SystemExit: a signal ended the run after saving it; `distributed` lists the exit statuses.
    """
    goodput = Goodput(seconds_before)
    profiling.check(profile_steps)
    if distributed.index() == 0:
        trackers_lib.check(trackers)
    with preflight.prepare_run(config, workdir, prepare_hours) as run:
        return TrainingLoop(run, trackers, profile_steps, goodput).run()


class TrainingLoop:
    """Loop over the steps of a run; the first process also prints and writes metrics."""

    def __init__(
        self,
        run: preflight.PreparedRun,
        trackers: Sequence[str | trackers_lib.Tracker] = trackers_lib.DEFAULT,
        profile_steps: int = 0,
        goodput: Goodput | None = None,
    ):
        self.prepared, self.trackers, self.profile_steps = run, trackers, profile_steps
        self.goodput = goodput or Goodput()
        self.experiment, self.compute, self.dataset = run.experiment, run.compute, run.dataset
        self.mesh, self.workdir = run.mesh, run.workdir
        self.parent, self.teacher = run.parent, run.teacher
        experiment, train = run.experiment, run.experiment.train
        teacher_model = run.teacher and run.teacher.experiment.model
        bos_id = run.dataset.tokenizer.bos_id
        self.program = Program(experiment, run.compute, run.mesh, teacher_model, bos_id)
        self.schedule = learning_rate_schedule(experiment.optimizer, train.num_steps)
        self.checkpoints = Checkpoints(run.workdir / CHECKPOINTS, keep=train.keep_checkpoints)
        self.snapshots = None
        if train.snapshot_every:
            self.snapshots = Checkpoints(run.workdir / SNAPSHOTS, keep=None)
        self.first = distributed.index() == 0
        self.flops_per_token = formulas.training_flops_per_token(
            experiment.model, experiment.data.sequence_length
        )
        self.batch_sharding = sharding.batch_sharding(run.mesh)
        self.interruption = distributed.Interruption()

    def run(self) -> dict[str, float]:
        """Restores or initialises, trains, and writes the final outputs."""
        # After a signal during startup or compilation, the loop takes no step.
        with self.interruption.handling_signals():
            state, step = self._restore_and_train()
        if step < self.experiment.train.num_steps:
            return self._stopped(step)
        return self._finish(state)

    def _restore_and_train(self) -> tuple[dict, int]:
        """Trains and saves; returns the last state and its step."""
        c = self.experiment.train
        with self._waiting("reading the checkpoint"):
            restored = self.checkpoints.restore(self.program.abstract_state)
        if restored is None:
            state, position, start = self._initial(), 0, 0
        else:
            state, position, start = restored
        self.writer = metrics_lib.NullWriter()
        if self.first:
            # Drops the records of steps after the checkpoint, since these steps run again.
            self.writer = metrics_lib.MetricsWriter(
                self.workdir, resume_step=start, trackers=self.trackers
            )
        self._print(self.prepared.summary(start))
        stop = min(c.num_steps, c.stop_after or c.num_steps)
        try:
            step = start
            if start < stop:
                state, step = self._loop(state, position, start, stop)
            with self._waiting("saving the last checkpoint"):
                if step:
                    self._save(step, state, last=True)
                else:  # stopped before the first step: nothing to save
                    self.checkpoints.close()
                self._with_snapshots(Checkpoints.close)
            if step > start:
                self.goodput.book("saving")
                self.writer.write_timing(step, **self.goodput.record())
                self._print(str(self.goodput))
            return state, step
        except BrokenPipeError:  # an OSError that is no failure of the disk
            raise
        except OSError as error:
            raise UserError(
                f"stopped: {error}. The last checkpoint is intact (steps "
                f"{self.checkpoints.steps()}); fix the cause and run the same command to resume"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # an earlier write has raised the same error
                self.writer.close()

    def _initial(self) -> dict:
        """Returns the state before the first step, with the parent's weights if there is one."""
        with self._waiting("drawing the initial weights"):
            state = self.program.init(jax.random.key(self.experiment.train.seed))
        if self.parent is None:
            return state
        with self._waiting(f"reading {self.parent.workdir}"):
            abstract = self.program.abstract_state["params"]
            # Frees all weights but embedding and head before the parent's are read.
            initial = growth.growable(state.pop("params"))
            vocab_size = self.parent.experiment.model.vocab_size
            abstract_parent = growth.parent_abstract(abstract, vocab_size)
            params = read_parameters(self.parent.checkpoints, self.parent.step, abstract_parent)
            params = growth.grow(params, initial, abstract)
        return state | {"params": params}

    def _waiting(self, activity: str) -> progress.waiting:
        return progress.waiting(activity, shown=self.first)

    def _print(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def _stopped(self, step: int) -> dict:
        signal = self.interruption.signal
        self._print(ending.stopped(step, self.experiment.train.num_steps, signal))
        if signal:
            sys.exit(distributed.STATUS[signal])
        return {}

    def _global_batches(self, batches, batch_size: int):
        """Yields global arrays over the mesh from this process's rows of each batch."""
        shape = (batch_size, self.experiment.data.sequence_length + 1)
        for rows in batches:
            yield jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

    def _loader_options(self, batch_size: int) -> dict[str, int]:
        """Returns the loader's options for this process's share of each batch."""
        index, count = loader.share(self.batch_sharding, batch_size)
        return {
            "sequence_length": self.experiment.data.sequence_length,
            "batch_size": batch_size,
            "process_index": index,
            "process_count": count,
        }

    def _loop(self, state: dict, position: int, start: int, stop: int) -> tuple[dict, int]:
        """Runs steps start .. stop - 1, or until a signal; returns the state and its step."""
        c, e = self.experiment.train, self.experiment
        options = self._loader_options(c.batch_size) | {"seed": c.seed, "position": position}
        batches = self._global_batches(loader.train_batches(self.dataset, **options), c.batch_size)
        teacher = self._teacher()
        self.goodput.book("startup")
        train_step = self._train_step()
        self.goodput.book("compiling")
        pending, done = None, start
        clock = metrics_lib.Clock(
            tokens_per_step=e.tokens_per_step,
            flops_per_token=self.flops_per_token,
            num_devices=self.mesh.size,
            local_devices=self.mesh.local_devices,
        )
        if c.snapshot_every and start % c.snapshot_every == 0:
            self._keep_snapshot(
                start, state
            )  # the earlier process may have ended before writing it
            self.goodput.book("saving")
        folder = self.writer.folder and self.writer.folder / profiling.FOLDER
        with (
            progress.Steps(c.num_steps, start, shown=self.first) as bar,
            profiling.StepTrace(folder, self.profile_steps, start, clock, self.goodput) as trace,
        ):
            while done < stop and not self.interruption.should_stop(done):
                rows = self.goodput.next(batches, pending and pending[1])
                inputs = state, rows, *teacher  # `state` is donated
                state, metrics = trace.run(done + 1, train_step, *inputs)
                if pending is not None:  # the new step is running: read the last one's metrics
                    self._report(*pending, bar, clock)
                done += 1
                pending = (done, metrics)
                evaluate = done % c.eval_every == 0 or done == c.num_steps
                save = done % c.checkpoint_every == 0
                snapshot = c.snapshot_every and done % c.snapshot_every == 0
                if evaluate or save or snapshot:
                    self._report(*pending, bar, clock)  # raises before a bad state could be saved
                    pending = None
                    self.goodput.book(STEPS)
                    with clock.paused():
                        if evaluate:
                            self._evaluate(done, state["params"], bar)
                            self.goodput.book("validating")
                        if snapshot:
                            self._keep_snapshot(done, state)
                        if save:
                            self._save(done, state)
                    self.goodput.book("saving")
            if pending is not None:
                self._report(*pending, bar, clock)
        self.goodput.book(STEPS)
        return state, done

    def _teacher(self) -> list[dict]:
        """Reads the teacher's parameters, if there is one."""
        if self.teacher is None:
            return []
        with self._waiting(f"reading {self.teacher.workdir}"):
            abstract = self.program.abstract_teacher
            return [read_parameters(self.teacher.checkpoints, self.teacher.step, abstract)]

    def _train_step(self) -> Callable:
        """Compiles the training step; returns once all processes have compiled it.

        Without that barrier a process that compiles faster waits in its first collective, where
        gloo times out after 30 s.
        """
        with self._waiting("compiling the training step"):
            compiled = self.program.lowered_step().compile()
            distributed.gather("compiled", "")
            return compiled

    def _report(
        self, step: int, metrics: dict, bar: progress.Steps, clock: metrics_lib.Clock
    ) -> None:
        """Waits for a step's metrics, checks them, and records them every `log_every` steps."""
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        first = clock.steps == 0
        clock.tick()
        if first:
            seconds = runtime.seconds_since_launch()
            self.writer.write_timing(step, seconds_to_first_step=seconds)
            bar.write(f"first step {seconds:.1f} s after launch")
        self._check_values(step, values)
        c, e = self.experiment.train, self.experiment
        speed = f"{clock.tokens_per_second:,.0f} tokens/s"
        bar.step(f"loss {values['loss']:.3f}, {speed}")
        if step % c.log_every == 0 or step == c.num_steps:
            # The optimizer counts from 0 and does not count skipped steps.
            updates = step - 1 - values.get("skipped_steps", 0)
            rate = float(self.schedule(max(updates, 0))) * e.optimizer.matrix_learning_rate
            rate *= e.optimizer.lr_scale
            tokens = step * e.tokens_per_step
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            exaflops = tokens * self.flops_per_token / 1e18
            self.writer.write(step, tokens=tokens, **finite, learning_rate=rate, exaflops=exaflops)
            if timing := clock.lap():
                self.writer.write_timing(step, **timing)

    def _check_values(self, step: int, values: dict[str, float]) -> None:
        """Raises a UserError if the run cannot or should not continue after this step."""
        c = self.experiment.train
        wrong = [f"{name} = {v}" for name, v in values.items() if not math.isfinite(v)]
        if values.get("bad") and not wrong:
            wrong = [
                f"loss = {values['loss']:.4g}, over config.train.spike_factor = {c.spike_factor} "
                f"times {values['mean_loss']:.4g}, the mean of recent losses"
            ]
        # A skipped step is no error while the weights are finite.
        if c.bad_steps == "skip" and math.isfinite(values.get("param_norm", math.nan)):
            if values["bad_steps_in_a_row"] < c.max_bad_steps:
                return
            wrong.append(f"config.train.max_bad_steps = {c.max_bad_steps} bad steps in a row")
        if wrong:
            raise UserError(
                f"step {step}: {', '.join(wrong)}: stopped. "
                f"Checkpoints of steps {self._saved_steps()} are intact; lower "
                "config.optimizer.matrix_learning_rate, or train on other data, in a new --workdir"
            )

    def _evaluate(self, step: int, params: dict, bar: progress.Steps) -> None:
        """Records bits per byte over the validation split, or its first `eval_rows` rows."""
        e = self.experiment
        size = e.train.batch_size // e.train.grad_accumulation
        options = self._loader_options(size) | {"limit": e.train.eval_rows}
        batches = self._global_batches(loader.validation_batches(self.dataset, **options), size)
        token_bytes, dropped_V = self.dataset.token_bytes, self.dataset.tokenizer.dropped_bytes()
        if dropped_V is not None:
            token_bytes = np.stack([token_bytes, dropped_V])
        unused = e.model.vocab_size - self.dataset.vocab_size
        token_bytes = np.pad(token_bytes, [(0, 0)] * (token_bytes.ndim - 1) + [(0, unused)])
        sums = np.zeros(6 if e.is_masked else 3)
        with self._waiting("validating"):
            for rows in batches:
                sums += jax.device_get(self.program.eval_step(params, rows, token_bytes))
        nats, num_bytes, targets = sums[:3]
        record = {
            "tokens": step * e.tokens_per_step,
            "validation_loss": nats / targets,
            "validation_bpb": nats / (math.log(2) * num_bytes),
        }
        scope = ""
        if e.is_masked:
            record["validation_bpb_all"] = sums[3] / (math.log(2) * sums[4])
            scope = f" of targets that count, {record['validation_bpb_all']:.4f} of all"
        self._check_values(step, record)
        self.writer.write(step, **record)
        bar.write(f"step {step:,}: validation {record['validation_bpb']:.4f} bits per byte{scope}")

    def _save(self, step: int, state: dict, last: bool = False) -> None:
        """Saves a checkpoint; if that fails, the run goes on with a warning.

        A failed save ends the run if it is the last one, or if there are several processes, since
        the others do not notice the failure. A failure to write records also ends the run, after
        the state has been saved.
        """
        position = step * self.experiment.train.batch_size
        if not last:
            self.writer.write_timing(step, **self.goodput.record())
        flush_error = None
        try:
            # Before the checkpoint, so that a resumed run lacks no records.
            self.writer.flush()
        except OSError as error:
            flush_error = error
        try:
            self.checkpoints.save(step, state, position)
            if last:
                self.checkpoints.close()
            elif flush_error:
                self.checkpoints.wait()
        except OSError as error:
            if last or distributed.count() > 1:
                raise
            warn(f"{error}; the run goes on, its checkpoints are {self._saved_steps()}")
        if flush_error:
            raise flush_error

    def _keep_snapshot(self, step: int, state: dict) -> None:
        """Saves a snapshot of the parameters; a failure is a warning, as in `_save`."""
        snapshot = {"params": state["params"], "step": state["step"]}
        position = step * self.experiment.train.batch_size
        self._with_snapshots(lambda snapshots: snapshots.save(step, snapshot, position))

    def _with_snapshots(self, operation: Callable[[Checkpoints], None]) -> None:
        if self.snapshots is None:
            return
        try:
            operation(self.snapshots)
        except OSError as error:
            if distributed.count() > 1:
                raise
            warn(f"{self.snapshots.directory}: {error}; the run goes on")

    def _saved_steps(self) -> list[int]:
        with contextlib.suppress(OSError):
            self.checkpoints.wait()
        return self.checkpoints.steps()

    def _finish(self, state: dict) -> dict[str, float]:
        """Writes sample and curves; returns the last evaluation."""
        distributed.gather("written", "")  # waits until the first process has closed metrics.jsonl
        folder = self.writer.folder or self.workdir
        records = metrics_lib.read_records(folder / metrics_lib.METRICS)
        evaluations = [r for r in records if {"validation_bpb", "tokens"} <= r.keys()]
        if not self.first:
            return evaluations[-1] if evaluations else {}
        if not evaluations:
            raise UserError(f"{folder / metrics_lib.METRICS} has lost its records")
        return ending.write(self.prepared, self.program.graph, state["params"], folder, evaluations)
