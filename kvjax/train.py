"""The training loop.

Every run is a function of its config: the same config gives the same numbers to the bit on the
same machine (measured on CPU), killed and resumed or not. The loop dispatches step n, then reads
the metrics of step n - 1, so the device never waits for the host.
"""

import contextlib
import itertools
import math
import signal
import time

from etils import epath
from flax import nnx
import jax
import ml_collections
import numpy as np
import tqdm

from kvjax import costs
from kvjax import experiment as experiment_lib
from kvjax import metrics as metrics_lib
from kvjax import preflight
from kvjax import runtime
from kvjax import sharding
from kvjax.checkpoint import CHECKPOINTS
from kvjax.checkpoint import Checkpoints
from kvjax.checkpoint import claim
from kvjax.checkpoint import write_atomically
from kvjax.configuration import to_text
from kvjax.data import loader
from kvjax.data import prepare
from kvjax.decoding import Generator
from kvjax.decoding import max_positions
from kvjax.errors import UserError
from kvjax.experiment import Experiment
from kvjax.model.transformer import Compute
from kvjax.optim import learning_rate_schedule
from kvjax.program import Program
from kvjax.text_generation import generate


def train(config: ml_collections.ConfigDict, workdir: epath.Path) -> dict[str, float]:
    """Trains to the end or to `train.stop_after`, resuming what the workdir holds.

    Returns:
      The last validation record: step, tokens, validation_loss, validation_bpb.

    Raises:
      UserError: a config, workdir, data set or machine that cannot be used as asked, before
        anything expensive; a non-finite loss or a full disk, with the last checkpoint intact.
    """
    workdir = runtime.absolute(workdir)
    experiment = experiment_lib.resolve(config)
    preflight.check_processes()
    preflight.check_vocabulary(experiment)
    mesh = sharding.make_mesh(experiment.mesh, jax.devices())
    platform = mesh.devices.flat[0].platform
    compute = experiment.compute.resolve(platform, experiment.model.block.num_layers)
    preflight.check_batch(experiment, mesh)
    preflight.check_memory(experiment, compute, mesh)
    with preflight.exclusive(workdir):
        claim(workdir / "config.json", preflight.identity(config))
        write_atomically(workdir / "config.txt", to_text(config))
        dataset = loader.open_dataset(prepare.prepare(experiment.data))
        claim(workdir / "dataset.json", {"dataset": dataset.path.name})
        write_atomically(workdir / prepare.TOKENIZER, dataset.tokenizer.to_json())
        return Run(experiment, compute, mesh, workdir, dataset).run()


class Run:
    """One process's part of a run: its state, its files, its loop."""

    def __init__(self, experiment, compute, mesh, workdir, dataset):
        self.experiment: Experiment = experiment
        self.compute: Compute = compute
        self.mesh = mesh
        self.workdir: epath.Path = workdir
        self.dataset: loader.PackedDataset = dataset
        if dataset.vocab_size != experiment.model.vocab_size:
            raise UserError(
                f"config.data.vocab_size = {experiment.model.vocab_size}: the tokenizer of "
                f"{dataset.path} has {dataset.vocab_size}; set the key to that"
            )
        self.program = Program(experiment, compute, mesh)
        self.schedule = learning_rate_schedule(experiment.optimizer, experiment.train.num_steps)
        self.checkpoints = Checkpoints(
            workdir / CHECKPOINTS, keep=experiment.train.keep_checkpoints
        )
        self.stop_signal = None

    def run(self) -> dict[str, float]:
        """Restores or initialises, loops, and writes down the end."""
        c = self.experiment.train
        restored = self.checkpoints.restore(self.program.abstract_state)
        if restored is None:
            state, position, start = self.program.init(jax.random.key(c.seed)), 0, 0
        else:
            state, position, start = restored
        self.writer = metrics_lib.MetricsWriter(self.workdir, resume_step=start)
        self._announce(start)
        stop = min(c.num_steps, c.stop_after or c.num_steps)
        try:
            with self._signals():
                state, step = self._loop(state, position, start, stop)
            if step < c.num_steps:
                self._save(step, state, last=True)
                reason = f"on {self.stop_signal.name}" if self.stop_signal else "as asked"
                print(
                    f"Stopped {reason} at step {step} of {c.num_steps}, saved. "
                    "The same command goes on from there."
                )
                return {}
            self._save(step, state, last=True)
        except OSError as error:
            raise UserError(
                f"stopped: {error}. The last checkpoint is intact (steps "
                f"{self.checkpoints.steps()}); mend that and run the same command to resume"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # records are written already, or have raised
                self.writer.close()
        return self._finish(state)

    def _announce(self, start: int) -> None:
        e = self.experiment
        counts = costs.parameters(e.model)
        cache = costs.cache_bytes_per_token(e.model, self.compute.dtype)
        print(
            f"{e.name}: {counts['total']:,} parameters, {cache:,} cache bytes per token "
            f"({self.compute.dtype}), {e.train.num_steps:,} steps of {e.tokens_per_step:,} tokens, "
            f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"
        )
        print(f"workdir {self.workdir}" + (f", resuming from step {start:,}" if start else ""))

    def _loop(self, state: dict, position: int, start: int, stop: int) -> tuple[dict, int]:
        """Steps start .. stop - 1, or until a signal; the state and the number of steps taken."""
        c, e = self.experiment.train, self.experiment
        batches = loader.train_batches(
            self.dataset,
            sequence_length=e.data.sequence_length,
            batch_size=c.batch_size,
            seed=c.seed,
            position=position,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        batch_sharding = sharding.batch_sharding(self.mesh)
        bar = tqdm.tqdm(
            total=c.num_steps,
            initial=start,
            mininterval=0.5,
            unit="step",
        )
        pending, done = None, start
        clock = Clock()
        with bar:
            while done < stop and self.stop_signal is None:
                rows = jax.make_array_from_process_local_data(batch_sharding, next(batches))
                state, metrics = self.program.train_step(state, rows)
                if pending is not None:
                    self._report(*pending, bar, clock)
                done += 1
                pending = (done, metrics)
                evaluate = done % c.eval_every == 0 or done == c.num_steps
                save = done % c.checkpoint_every == 0
                if evaluate or save:  # only a state known to be finite is saved
                    self._report(*pending, bar, clock)
                    pending = None
                    with clock.paused():
                        if evaluate:
                            self._evaluate(done, state["params"], bar)
                        if save:
                            self._save(done, state)
            if pending is not None:
                self._report(*pending, bar, clock)
        return state, done

    def _report(self, step: int, metrics: dict, bar: tqdm.tqdm, clock: "Clock") -> None:
        """Waits for a step's metrics, checks them, writes them down."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        first = clock.steps == 0
        clock.tick()
        if first:
            seconds = runtime.seconds_since_launch()
            self.writer.write_timing(step, seconds_to_first_step=seconds)
            bar.write(f"first step {seconds:.1f} s after launch")
        self._check_finite(step, values)
        tokens_per_second = clock.steps_per_second * self.experiment.tokens_per_step
        bar.set_postfix_str(f"loss {values['loss']:.3f}, {tokens_per_second:,.0f} tokens/s", False)
        bar.update(1)
        c = self.experiment.train
        if step % c.log_every == 0 or step == c.num_steps:
            rate = float(self.schedule(step - 1)) * self.experiment.optimizer.matrix_learning_rate
            tokens = step * self.experiment.tokens_per_step
            self.writer.write(step, tokens=tokens, **values, learning_rate=rate)
            if not first:
                self.writer.write_timing(step, tokens_per_second=tokens_per_second)

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        """Raises a UserError for a loss, gradient or weight that is not a number."""
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if bad:
            raise UserError(
                f"step {step}: {', '.join(f'{k} = {v}' for k, v in bad.items())}: stopped. "
                f"Checkpoints of steps {self._saved_steps()} are intact; lower "
                "config.optimizer.matrix_learning_rate, or train on other data, in a new --workdir"
            )

    def _evaluate(self, step: int, params: dict, bar: tqdm.tqdm) -> None:
        """Bits per byte over the validation split, or its first `eval_rows` rows."""
        e = self.experiment
        rows_per_batch = e.train.batch_size // e.train.grad_accumulation
        batches = loader.validation_batches(
            self.dataset,
            sequence_length=e.data.sequence_length,
            batch_size=rows_per_batch,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        batch_sharding = sharding.batch_sharding(self.mesh)
        limit = math.ceil(e.train.eval_rows / rows_per_batch) or None
        sums = np.zeros(3)
        for rows in itertools.islice(batches, limit):
            rows = jax.make_array_from_process_local_data(batch_sharding, rows)
            sums += jax.device_get(self.program.eval_step(params, rows, self.dataset.token_bytes))
        nats, num_bytes, targets = sums
        record = dict(
            tokens=step * e.tokens_per_step,
            validation_loss=nats / targets,
            validation_bpb=nats / (math.log(2) * num_bytes),
        )
        self._check_finite(step, record)
        self.writer.write(step, **record)
        bar.write(f"step {step:,}: validation {record['validation_bpb']:.4f} bits per byte")

    def _save(self, step: int, state: dict, last: bool = False) -> None:
        """Saves; a failure before the last save is a warning, and the run goes on."""
        position = step * self.experiment.train.batch_size
        self.writer.flush()
        try:
            self.checkpoints.save(step, state, position)
            if last:
                self.checkpoints.close()
        except OSError as error:
            if last:
                raise
            print(f"WARNING: {error}; the run goes on, its checkpoints are {self._saved_steps()}")

    def _saved_steps(self) -> list[int]:
        with contextlib.suppress(OSError):
            self.checkpoints.wait()
        return self.checkpoints.steps()

    @contextlib.contextmanager
    def _signals(self):
        """SIGTERM and Ctrl-C end the loop after the step under way."""

        def handle(number, frame):
            del frame
            self.stop_signal = signal.Signals(number)
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process

        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _finish(self, state: dict) -> dict[str, float]:
        """Sample, curves and the last figures."""
        records = metrics_lib.read_records(self.workdir / metrics_lib.METRICS)
        evaluations = [r for r in records if "validation_bpb" in r]
        if not evaluations:
            raise UserError(f"{self.workdir / metrics_lib.METRICS} has lost its records")
        last, e = evaluations[-1], self.experiment
        yardstick = self.dataset.info["xz_bits_per_byte"]
        metrics_lib.draw_curves(self.workdir, title=e.name, yardstick=yardstick)
        if e.train.sample_tokens:
            text = self._sample(state["params"])
            write_atomically(self.workdir / "sample.txt", text + "\n")
            print(f"\n--- sample ---\n{text}\n--------------\n")
        print(
            f"validation: {last['validation_bpb']:.4f} bits per byte after {last['tokens']:,} "
            f"tokens (xz -9e on the same text: {yardstick:.4f}); "
            f"{runtime.seconds_since_launch():.0f} s in this process\n"
            f"curves, metrics, sample and checkpoints: {self.workdir}"
        )
        return last

    def _sample(self, params: dict) -> str:
        """config.train.sample_prompt and what follows it, as far as the model has positions."""
        e, tokenizer = self.experiment, self.dataset.tokenizer
        prompt = e.train.sample_prompt
        num_tokens, limit = e.train.sample_tokens, max_positions(e.model)
        if limit is not None:
            num_tokens = min(num_tokens, limit - len(tokenizer.encode(prompt)))
        if num_tokens < 1:
            return prompt
        generator = Generator(nnx.merge(self.program.graph, params), self.compute)
        options = dict(num_tokens=num_tokens, seed=e.train.seed, end_at_special=False)
        return prompt + generate(generator, tokenizer, [prompt], **options).texts[0]


class Clock:
    """Steps per second since the second step, without pauses (the first step compiles)."""

    def __init__(self):
        self.steps = 0
        self._since = self._now = 0.0

    def tick(self) -> None:
        self._now = time.monotonic()
        if self.steps == 0:
            self._since = self._now
        self.steps += 1

    @contextlib.contextmanager
    def paused(self):
        before = time.monotonic()
        yield
        self._since += time.monotonic() - before

    @property
    def steps_per_second(self) -> float:
        elapsed = self._now - self._since
        return (self.steps - 1) / elapsed if elapsed > 0 else 0.0
