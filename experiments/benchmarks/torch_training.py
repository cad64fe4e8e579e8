"""The recipe's MHA model and training step in plain PyTorch, for comparison with kvjax.

Computes the same function and optimizer step as kvjax
(tests/experiments/benchmarks/test_torch_training.py), written in the usual way for `torch.compile`:
float32 master weights that are cast when used; scaled dot product attention with one named backend;
logits and their gradient as one array; fused AdamW; compiled Muon over stacks of matrices of equal
shape. Imports no JAX. `python -m experiments.benchmarks.train_benchmark --torch` runs this.
"""

import contextlib
import dataclasses
import math
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.benchmarks import contender

WARMUP = 3
_BACKENDS = {  # backends of scaled dot product attention; None: PyTorch chooses
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "default": None,
}
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model; RMSNorm without gain, RoPE, QK-norm, relu², no biases, untied head."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    rope_base: float
    norm_epsilon: float
    logit_softcap: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """An optimizer: keys of `kvjax.optim.OptimizerConfig`; the schedule is constant."""

    matrix_learning_rate: float
    embedding_learning_rate: float
    head_learning_rate: float
    momentum_start: float
    momentum_end: float
    momentum_warmup_steps: int
    newton_schulz_steps: int
    adam_b1: float
    adam_b2: float
    adam_epsilon: float
    clip_norm: float


# -- the model -------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A float32 matrix, cast to the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, *, zero: bool = False):
        super().__init__(inputs, outputs, bias=False)
        std = 0.0 if zero else min(1.0, math.sqrt(outputs / inputs)) / math.sqrt(inputs)
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def _norm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=epsilon)


def _rotate(x_BTNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + H/2) by their position's angle, in float32."""
    x1, x2 = x_BTNH.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x_BTNH.dtype)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.shape, width = s, s.num_heads * s.head_dim
        self.query, self.key, self.value = (Linear(s.d_model, width) for _ in range(3))
        self.out = Linear(width, s.d_model, zero=True)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape, projections = self.shape, (self.query, self.key, self.value)
        q, k, v = (p(x_BTD).unflatten(-1, (shape.num_heads, shape.head_dim)) for p in projections)
        q, k = (_rotate(_norm(x, shape.norm_epsilon), cos, sin) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BNTH.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.epsilon = s.norm_epsilon
        self.attention = Attention(s)
        self.up, self.down = Linear(s.d_model, s.mlp_dim), Linear(s.mlp_dim, s.d_model, zero=True)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(_norm(x_BTD, self.epsilon), cos, sin)
        return x_BTD + self.down(F.relu(self.up(_norm(x_BTD, self.epsilon))).square())


class Model(nn.Module):
    """The model; returns the mean loss in nats of tokens and targets [B, T]."""

    def __init__(self, shape: Shape, length: int, dtype: torch.dtype):
        super().__init__()
        s = self.shape = shape
        self.dtype = dtype
        self.embedding = nn.Embedding(s.vocab_size, s.d_model)  # N(0, 1)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_layers))
        self.head = Linear(s.d_model, s.vocab_size, zero=True)
        channels = torch.arange(0, s.head_dim, 2, dtype=torch.float64)
        theta = s.rope_base ** (-channels / s.head_dim)
        angle_T1F = torch.outer(torch.arange(length, dtype=torch.float64), theta)[:, None]
        self.register_buffer("cos", angle_T1F.cos().float(), persistent=False)
        self.register_buffer("sin", angle_T1F.sin().float(), persistent=False)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        T, epsilon, cap = tokens_BT.shape[1], self.shape.norm_epsilon, self.shape.logit_softcap
        x_BTD = _norm(self.embedding(tokens_BT).to(self.dtype), epsilon)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos[:T], self.sin[:T])
        z_BTV = self.head(_norm(x_BTD, epsilon)).float()
        return cap * torch.tanh(z_BTV / cap)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(tokens_BT).flatten(0, 1), targets_BT.flatten())


# -- the optimizer ---------------------------------------------------------------------------------


class Muon:
    """Nesterov momentum, orthogonalised; as `torch.optim.Muon`, all matrices of a shape at once."""

    def __init__(self, matrices: list[nn.Parameter], recipe: Recipe, dtype, *, compiled: bool):
        self.recipe, self.count = recipe, 0
        self.stacks = []
        for shape in sorted({tuple(p.shape) for p in matrices}):
            stack = [p for p in matrices if tuple(p.shape) == shape]
            self.stacks.append((stack, torch.zeros(len(stack), *shape, device=stack[0].device)))
        options = dict(
            rate=recipe.matrix_learning_rate, steps=recipe.newton_schulz_steps, dtype=dtype
        )

        def update(weights, grads, mean, beta):
            return _muon_update(weights, grads, mean, beta, **options)

        self.update = torch.compile(update, dynamic=False) if compiled else update

    @torch.no_grad()
    def step(self) -> None:
        r = self.recipe
        progress = min(1.0, self.count / r.momentum_warmup_steps)
        beta = torch.tensor(r.momentum_start + (r.momentum_end - r.momentum_start) * progress)
        for weights, mean in self.stacks:
            self.update(weights, [p.grad for p in weights], mean, beta)
        self.count += 1


def _muon_update(weights, grads, mean, beta, *, rate: float, steps: int, dtype) -> None:
    """Updates a stack of [out, in] matrices in place; beta is a scalar tensor."""
    gradient = torch.stack(grads)
    mean.copy_(beta * mean + (1 - beta) * gradient)
    x = (beta * mean + (1 - beta) * gradient).to(dtype)
    outputs, inputs = x.shape[1:]
    x = x.mT if outputs > inputs else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    x = x.mT if outputs > inputs else x
    x = rate * math.sqrt(max(1.0, outputs / inputs)) * x.float()
    for weight, change in zip(weights, x.unbind(), strict=True):
        weight.sub_(change)


class Training:
    """A model, its optimizer, and `step`.

    Args:
      length: T.
      parts: micro-batches per step.
      compile_mode: `torch.compile`'s mode for the model; None: model and Muon are not compiled.
    """

    def __init__(
        self,
        shape: Shape,
        recipe: Recipe,
        *,
        length: int,
        dtype: torch.dtype,
        device: str,
        parts: int = 1,
        compile_mode: str | None = "default",
    ):
        self.model = Model(shape, length, dtype).to(device)
        compiled = compile_mode is not None
        self.loss = (
            torch.compile(self.model, mode=compile_mode, dynamic=False) if compiled else self.model
        )
        self.parts, self.clip_norm = parts, recipe.clip_norm
        width = (shape.d_model / 768) ** -0.5
        tables = [
            dict(params=[self.model.embedding.weight], lr=recipe.embedding_learning_rate * width),
            dict(params=[self.model.head.weight], lr=recipe.head_learning_rate * width),
        ]
        self.adam = torch.optim.AdamW(
            tables,
            betas=(recipe.adam_b1, recipe.adam_b2),
            eps=recipe.adam_epsilon,
            weight_decay=0.0,
            fused=device == "cuda",
        )
        matrices = list(self.model.blocks.parameters())
        self.muon = Muon(matrices, recipe, dtype, compiled=compiled)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """Takes an optimizer step on rows [B, T + 1]; returns the loss without synchronisation."""
        total = 0.0
        for part in rows.chunk(self.parts):
            loss = self.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / self.parts
            loss.backward()
            total = total + loss.detach()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.adam.step()
        self.muon.step()
        self.model.zero_grad(set_to_none=True)
        return total


# -- timed -----------------------------------------------------------------------------------------


def training_speed(
    shape: dict,
    recipe: dict,
    rows: int,
    length: int,
    parts: int,
    parameters: int,
    attention: str,
    compile_mode: str,
    steps: int,
) -> dict:
    """Times whole training steps on one batch of random tokens.

    Args:
      shape, recipe: keyword arguments of `Shape` and `Recipe`.
      rows, length: size of the batch [rows, length + 1].
      parts: micro-batches per step.
      parameters: the number of parameters of kvjax's model.
      attention: a key of `_BACKENDS`.
      compile_mode: mode of `torch.compile`.

    Returns:
      The dict of `jax_training.training_speed` without matmul_flops, and with `parameters`, the
      version of `torch`, and a description of the `optimizer`.

    Raises:
      ValueError: this model has another number of parameters.
    """
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    training = Training(
        Shape(**shape),
        Recipe(**recipe),
        length=length,
        dtype=torch.bfloat16 if cuda else torch.float32,
        device="cuda" if cuda else "cpu",
        parts=parts,
        compile_mode=compile_mode,
    )
    if training.parameters != parameters:
        raise ValueError(f"{training.parameters:,} parameters, kvjax's model has {parameters:,}")
    size = (rows, length + 1)
    batch = torch.randint(0, training.model.shape.vocab_size, size)
    batch = batch.to(training.model.head.weight.device)
    last = None

    def dispatch() -> torch.cuda.Event | None:
        nonlocal last
        last = training.step(batch)
        if not cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()

    backend = _BACKENDS[attention]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        start = time.perf_counter()
        wait(dispatch())
        first = time.perf_counter() - start
        seconds = contender.step_seconds(dispatch, wait, steps=steps, warmup=WARMUP)
        wait(dispatch())
    return dict(
        seconds=seconds,
        first_step_seconds=first,
        loss=last.item(),
        peak_bytes=torch.cuda.max_memory_allocated() if cuda else None,
        platform="cuda" if cuda else "cpu",
        count=1,
        parameters=training.parameters,
        torch=torch.__version__,
        optimizer=f"AdamW{' (fused)' if cuda else ''}, Muon in stacks",
    )
