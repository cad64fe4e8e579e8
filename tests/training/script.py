"""A program for the training loop that only sums tokens, and a list of its calls."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np

BYTES, VOCABULARY, WIDTH = 257, 300, 5  # the model has rows that no token uses
BAD = (1, 2, 3, 6)  # steps that are skipped


class Script:
    """A program whose state sums all tokens seen; `calls` lists all calls in order."""

    def __init__(self, mesh):
        self.calls, self.rows, self.at = [], {}, {}  # `at`: step -> side effect
        self.place = jax.NamedSharding(mesh, jax.P())
        self.began = self.taught = None
        shapes = dict(embedding=(VOCABULARY, WIDTH), head=(WIDTH, VOCABULARY), total=())
        self.abstract_state = self._abstract(dict(params=shapes, step=()))
        self.abstract_teacher = self._abstract(dict(shapes, head=(WIDTH, BYTES)))
        self.graph = "graph"

    def _abstract(self, shapes):
        abstract = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=self.place),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        if "step" in abstract:
            abstract["step"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.place)
        return abstract

    def __call__(self, experiment, compute, mesh, teacher, bos_id):
        self.given = experiment, compute, mesh, teacher, bos_id
        return self

    def init(self, key):
        state = jax.tree.map(lambda x: jax.random.normal(key, x.shape), self.abstract_state)
        state["params"]["total"], state["step"] = jnp.float32(0), jnp.int32(0)
        return jax.device_put(state, self.place)

    def lowered_step(self):
        return types.SimpleNamespace(compile=lambda: self.calls.append("compile") or self.train)

    def train(self, state, rows, *teacher):
        step = int(state["step"]) + 1
        self.calls.append(f"step {step}")
        self.rows[step], self.taught = np.asarray(rows), teacher
        if self.began is None:
            self.began = state
        self.at.get(step, lambda: None)()
        total = jax.device_put(state["params"]["total"] + rows.sum() / 1e4, self.place)
        new = dict(params=state["params"] | dict(total=total))
        new["step"] = jax.device_put(jnp.int32(step), self.place)
        return new, self.metrics(step, total)

    def metrics(self, step, total):
        """Returns the metrics of a step; the gradient norm of a bad one is infinite."""
        count = sum(s <= step for s in BAD)
        in_a_row = next(n for n in range(9) if step - n not in BAD)
        grad_norm = math.inf if step in BAD else 0.5 + step
        metrics = dict(loss=total / step, grad_norm=grad_norm, param_norm=total, bad=step in BAD)
        metrics |= dict(skipped_steps=count, bad_steps_in_a_row=in_a_row)
        return {name: jnp.float32(value) for name, value in metrics.items()}

    def eval_step(self, params, rows, token_bytes):
        assert len(token_bytes) == VOCABULARY and not token_bytes[BYTES:].any()
        rows, masked = np.asarray(rows), self.given[0].is_masked
        self.calls.append(f"look at {rows.shape}")
        nats = float(params["total"]) * rows.sum()
        sums = nats, token_bytes[rows].sum(), rows.size
        return (*sums, 3 * nats, 2 * token_bytes[rows].sum(), 0) if masked else sums
