"""Random training programs without a fault, for the soak of the comparison of numbers.

A seed draws a recipe, and ``train`` runs it on the ranks of a job. Nothing of commlens is imported.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _soak_program import generate
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,  # noqa: F401 - imported once, before the forks
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

WORDS: Final = 24
WIDTH: Final = 16
LENGTH: Final = 6


@dataclass(frozen=True)
class Recipe:
    """What a program consists of."""

    seed: int
    size: int  # ranks
    how: str  # one of WAYS
    blocks: tuple[str, ...]
    optimizer: str
    scheduler: str
    steps: int
    accumulate: int  # micro-batches of a step
    precision: str  # float32, autocast, bfloat16, or scaler
    dropout: float
    tied: bool
    checkpointing: bool
    compiled: str  # a backend of torch.compile
    clipped: bool
    average: str  # a second copy of the parameters
    evaluates: bool
    reloads: bool
    uneven: bool  # batches of other lengths on each rank
    groups: int  # of parameters
    checks: str  # the setting
    nodes: int

    def __str__(self) -> str:
        """Return the fields that are not empty."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return " ".join(f"{name}={value}" for name, value in told.items() if value)


def draw(seed: int) -> Recipe:
    """Return the recipe of a seed."""
    rng = random.Random(seed)

    def sometimes(share: float) -> bool:
        return rng.random() < share

    how = rng.choice(list(WAYS))
    sizes = {
        "hsdp": (4,),
        "2d": (4,),
        "ddp-tp": (4,),
        "halves": (4,),
        "tp": (2, 4),  # shards of the same size
        "tp-sequence": (2, 4),
        "soak": (2, 3, 4),
    }
    size = rng.choice(sizes.get(how, (2, 2, 3, 4)))
    parallel = how in ("tp", "tp-sequence", "2d", "ddp-tp")
    kinds = ["mlp", "mlp", "attention", "buffer", "adapter", "frozen"]
    if not parallel:
        kinds += ["batchnorm", "counter"]
    if not parallel and how not in ("fsdp", "hsdp"):  # all ranks must use all parameters
        kinds += ["experts"]
    if not parallel and how not in ("fsdp", "hsdp", "fsdp1", "zero"):
        kinds += ["convolution", "complex", "spectral"]
    blocks = tuple(rng.choice(kinds) for _ in range(rng.choice([1, 2, 2, 3])))
    precision = rng.choice(["float32", "float32", "float32", "autocast", "bfloat16", "scaler"])
    by_hand = how in ("plain", "apart", "averaging", "ddp")
    return Recipe(
        seed=seed,
        size=size,
        how=how,
        blocks=blocks,
        optimizer=rng.choice(list(OPTIMIZERS)),
        scheduler=rng.choice(["", "", "step", "cosine", "warmup", "plateau"]),
        steps=rng.randint(5, 9),
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        precision=(
            precision
            if precision != "scaler" or (by_hand and "complex" not in blocks)
            else "float32"
        ),
        dropout=rng.choice([0.0, 0.1, 0.5]),
        tied=sometimes(0.3) and not parallel,
        checkpointing=sometimes(0.2),
        compiled=rng.choice(["eager", "aot_eager"]) if sometimes(0.06) else "",
        clipped=sometimes(0.3) and how not in ("tp", "2d", "ddp-tp"),
        average=rng.choice(["", "", "", "ema", "ema-inside", "swa", "ema-on-one"]),
        evaluates=sometimes(0.3),
        reloads=sometimes(0.2),
        uneven=sometimes(0.3),
        groups=rng.choice([1, 1, 2]),
        checks=rng.choice(
            ["every 1", "every 1", "every 2", "every 1,nan", "every 1,tolerance=1e-6"]
        ),
        nodes=2 if size == 4 and sometimes(0.2) else 1,
    )


# --- the model


class Residual(nn.Module):
    """A block, with a norm before it and dropout behind it."""

    def __init__(self, inner: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the block adds to it."""
        return x + self.dropout(self.inner(self.norm(x)))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both layers."""
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention, with a mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to what came before."""
        return self.attention(x, x, x, attn_mask=self.mask.to(x.dtype), need_weights=False)[0]


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return self.base(x) + self.up(self.down(x))


class Buffered(nn.Module):
    """A linear layer that counts its calls, and has a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frequencies", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        self.calls += 1
        return self.scale * self.linear(x + self.frequencies.to(x.dtype))


class Counter(nn.Module):
    """A linear layer with statistics of what this rank has seen, which are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract the mean of the batch."""
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
            self.seen += len(x)
        return self.linear(x - self.mean.to(x.dtype))


class Normalised(nn.Module):
    """A linear layer and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the batch."""
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Experts(nn.Module):
    """Two experts of which the router uses the better one, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        self.register_buffer("load", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to one expert."""
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        with torch.no_grad():
            self.load += torch.stack([(best == number).sum() for number in range(2)])
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).unsqueeze(-1)
            if chosen.any():
                found = found + chosen * weights[..., number : number + 1] * expert(x)
        return found


class Convolution(nn.Module):
    """A convolution over the words, its weights laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))
        self.inner.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve."""
        return self.inner(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


class Complex(nn.Module):
    """A filter of the spectrum, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(LENGTH // 2 + 1, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Filter."""
        spectrum = torch.fft.rfft(x.float(), dim=1) * self.filter
        return torch.fft.irfft(spectrum, n=LENGTH, dim=1).to(x.dtype)


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def _frozen() -> nn.Module:
    return Mlp().requires_grad_(False)


BLOCKS: Final[dict[str, Callable[[], nn.Module]]] = {
    "mlp": Mlp,
    "attention": Attention,
    "adapter": Adapter,
    "frozen": _frozen,
    "buffer": Buffered,
    "counter": Counter,
    "batchnorm": Normalised,
    "experts": Experts,
    "convolution": Convolution,
    "complex": Complex,
    "spectral": _spectral,
}


class Net(nn.Module):
    """A small language model of such blocks."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            Residual(BLOCKS[name](), recipe.dropout) for name in recipe.blocks
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if recipe.tied:
            self.head.weight = self.embedding.weight
        self._checkpointing = recipe.checkpointing

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the score of each word."""
        x = self.embedding(words)
        for block in self.blocks:
            if self._checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Holder(nn.Module):
    """A model and its average in one module, as frameworks for training have them."""

    def __init__(self, model: nn.Module, average: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.average = average


# --- the optimizers

OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, 1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True),
    "tensor-lr": lambda groups: torch.optim.AdamW(groups, torch.tensor(1e-2), foreach=False),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 1e-3, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, 1e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, 1e-3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, 1e-2),
}


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with one or two groups of parameters."""
    trained = [each for each in model.parameters() if each.requires_grad]
    name = recipe.optimizer
    if name == "adafactor" and any(each.is_complex() for each in trained):
        name = "adam"
    if name in ("adamw", "adamw-fused", "adafactor") and any(
        hasattr(each, "placements") for each in trained
    ):
        name = "tensor-lr"  # the others take no mixture of DTensors and tensors
    if name == "adamw-fused" and any(each.is_complex() for each in trained):
        name = "adamw"
    halves = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]
    groups = [{"params": half} for half in halves if half] if recipe.groups > 1 else trained
    return OPTIMIZERS[name](groups)


def scheduler_of(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler of the learning rate, if there is one."""
    schedulers = torch.optim.lr_scheduler
    kinds: dict[str, Callable[[], Any]] = {
        "step": lambda: schedulers.StepLR(optimizer, 2),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, recipe.steps),
        "warmup": lambda: schedulers.LinearLR(optimizer, 0.1, total_iters=3),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    }
    return kinds[recipe.scheduler]() if recipe.scheduler else None


# --- the data


class Data:
    """The batches of a rank."""

    def __init__(self, recipe: Recipe, part: int) -> None:
        self._recipe = recipe
        self._part = part

    def batch(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words and the words that follow them."""
        seed = self._recipe.seed * 7919 + 1009 * step + 101 * micro + self._part
        generator = torch.Generator().manual_seed(seed)
        length = 2 + (self._part + step) % 3 if self._recipe.uneven else 4
        words = torch.randint(0, WORDS, (length, LENGTH + 1), generator=generator)
        return words[:, :-1], words[:, 1:]


def loss_of(recipe: Recipe, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Run the model forward, and return the loss."""
    half = torch.float16 if recipe.precision == "scaler" else torch.bfloat16
    with torch.autocast("cpu", half, enabled=recipe.precision in ("autocast", "scaler")):
        scores = model(batch[0])
    if hasattr(scores, "full_tensor"):
        scores = scores.full_tensor()
    return F.cross_entropy(scores.float().flatten(0, 1), batch[1].flatten())


# --- the loop


class Trainer:
    """A loop over steps that all ways of training share."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: Data,
        *,
        reduce: Callable[[], None] = lambda: None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.data = data
        self.optimizer = optimizer or optimizer_of(recipe, model)
        self.reduce = reduce
        self.scheduler = scheduler_of(recipe, self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision == "scaler")
        self.forward: Any = (
            torch.compile(model, backend=recipe.compiled) if recipe.compiled else model
        )
        self.average = self._average()

    def run(self) -> None:
        """Train."""
        for step in range(1, self.recipe.steps + 1):
            self.step(step)

    def step(self, step: int) -> None:
        """Train one step."""
        recipe = self.recipe
        self.model.train()
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        total = torch.zeros(())
        for micro in range(recipe.accumulate):
            with self._without_reduction(last=micro == recipe.accumulate - 1):
                loss = loss_of(recipe, self.forward, self.data.batch(step, micro))
                self.scaler.scale(loss / recipe.accumulate).backward()
            total += loss.detach()
        self.reduce()
        if recipe.clipped:
            self.scaler.unscale_(self.optimizer)
            self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._after_step(step, total)

    def _clip(self) -> None:
        if hasattr(self.model, "clip_grad_norm_"):
            self.model.clip_grad_norm_(1.0)
            return
        norm = nn.utils.get_total_norm(
            [each.grad for each in self.model.parameters() if each.grad is not None]
        )
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)

    def _without_reduction(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last:
            return contextlib.nullcontext()
        if hasattr(self.model, "no_sync") and not self.recipe.compiled:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _after_step(self, step: int, total: torch.Tensor) -> None:
        recipe = self.recipe
        if recipe.scheduler == "plateau":
            if recipe.how != "apart":
                dist.all_reduce(total)
            self.scheduler.step(float(total))
        elif self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if recipe.evaluates and step % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                loss_of(recipe, self.model, self.data.batch(1000 + step))
        if recipe.reloads and step == recipe.steps // 2 and recipe.how in ("ddp", "plain"):
            self._reload()

    def _reload(self) -> None:
        """Save a checkpoint, and go on from it with another optimizer."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        model, optimizer = torch.load(file)
        self.model.load_state_dict(model)
        self.optimizer = optimizer_of(self.recipe, self.model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler = scheduler_of(self.recipe, self.optimizer)

    def _average(self) -> AveragedModel | None:
        kind = self.recipe.average
        plain = self.recipe.how in ("ddp", "ddp-join", "plain", "zero")
        if not kind or not plain or (kind == "ema-on-one" and dist.get_rank()):
            return None
        rule = None if kind == "swa" else get_ema_multi_avg_fn(0.9)
        try:
            average = AveragedModel(self.model, multi_avg_fn=rule, use_buffers=kind == "ema")
        except RuntimeError:  # a parametrised module cannot be copied
            return None
        if kind == "ema-inside":
            self.holder = Holder(self.model, average)
        return average


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """Average the gradients over a group by hand."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


# --- ways to train


def _rank_seed(recipe: Recipe) -> None:
    torch.manual_seed(recipe.seed + 1000 + dist.get_rank())


def _net(recipe: Recipe) -> nn.Module:
    torch.manual_seed(recipe.seed)
    net = Net(recipe)
    return net.to(torch.bfloat16) if recipe.precision == "bfloat16" else net


def _ddp_of(recipe: Recipe, net: nn.Module, **options: Any) -> DistributedDataParallel:
    unused = "experts" in recipe.blocks
    return DistributedDataParallel(net, find_unused_parameters=unused, **options)


def train_ddp(recipe: Recipe) -> None:
    """DDP, as set up by the seed: the ranks need not be seeded alike."""
    torch.manual_seed(recipe.seed + dist.get_rank())
    net = Net(recipe)
    net = net.to(torch.bfloat16) if recipe.precision == "bfloat16" else net
    options: dict[str, Any] = random.Random(recipe.seed).choice(
        [
            {},
            {"broadcast_buffers": False},
            {"gradient_as_bucket_view": True},
            {"static_graph": True} if "experts" not in recipe.blocks else {},
            {"bucket_cap_mb": 0.001},
        ]
    )
    model = _ddp_of(recipe, net, **options)
    _rank_seed(recipe)
    Trainer(recipe, model, Data(recipe, dist.get_rank())).run()


def train_ddp_hook(recipe: Recipe) -> None:
    """DDP with a communication hook."""
    model = _ddp_of(recipe, _net(recipe))
    kind = random.Random(recipe.seed).choice(["fp16", "bf16", "power", "local"])
    averager = None
    optimizer = None
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif kind == "power" and not any(p.is_complex() for p in model.parameters()):
        state: Any = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind == "local":
        state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(optimizer_of(recipe, model), averager)
    _rank_seed(recipe)
    if optimizer is None:
        Trainer(recipe, model, Data(recipe, dist.get_rank())).run()
        return
    data = Data(recipe, dist.get_rank())
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        loss_of(recipe, model, data.batch(step)).backward()
        optimizer.step()


def train_join(recipe: Recipe) -> None:
    """DDP with another number of batches on each rank."""
    model = _ddp_of(recipe, _net(recipe))
    _rank_seed(recipe)
    trainer = Trainer(recipe, model, Data(recipe, dist.get_rank()))
    trainer.scheduler = None
    with Join([model]):
        for step in range(1, recipe.steps + 1 + 2 * (dist.get_rank() % 2)):
            trainer.optimizer.zero_grad()
            loss_of(recipe, model, trainer.data.batch(step)).backward()
            trainer.optimizer.step()


def train_zero(recipe: Recipe) -> None:
    """DDP with an optimizer whose states are sharded."""
    model = _ddp_of(recipe, _net(recipe))
    optimizer = ZeroRedundancyOptimizer(
        [each for each in model.parameters() if each.requires_grad],
        optimizer_class=torch.optim.AdamW,
        lr=1e-2,
        parameters_as_bucket_view=recipe.clipped,
    )
    _rank_seed(recipe)
    Trainer(recipe, model, Data(recipe, dist.get_rank()), optimizer=optimizer).run()


def train_plain(recipe: Recipe) -> None:
    """Reduce gradients by hand."""
    net = _net(recipe)
    _rank_seed(recipe)
    data = Data(recipe, dist.get_rank())
    Trainer(recipe, net, data, reduce=lambda: average_gradients(net)).run()


def train_apart(recipe: Recipe) -> None:
    """Train another model on each rank, of the same kind, as a search does."""
    if recipe.seed % 2:
        torch.manual_seed(recipe.seed)
    else:
        torch.manual_seed(recipe.seed + dist.get_rank())
    net = Net(recipe)
    optimizer = optimizer_of(recipe, net)
    if recipe.seed % 3:
        optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    Trainer(
        recipe, net, Data(recipe, dist.get_rank() * (recipe.seed % 5)), optimizer=optimizer
    ).run()


def train_halves(recipe: Recipe) -> None:
    """Train two models, each in DDP on half of the ranks."""
    middle = recipe.size // 2
    halves = [range(middle), range(middle, recipe.size)]
    groups = [dist.new_group(list(half)) for half in halves]
    which = int(dist.get_rank() >= middle)
    torch.manual_seed(recipe.seed + which)
    model = _ddp_of(recipe, Net(recipe), process_group=groups[which])
    optimizer = optimizer_of(recipe, model)
    optimizer.param_groups[0]["lr"] *= 1 + which
    _rank_seed(recipe)
    Trainer(recipe, model, Data(recipe, dist.get_rank()), optimizer=optimizer).run()


def train_averaging(recipe: Recipe) -> None:
    """Train apart, and average the parameters now and then."""
    net = _net(recipe)
    _rank_seed(recipe)
    trainer = Trainer(recipe, net, Data(recipe, dist.get_rank()))
    for step in range(1, recipe.steps + 1):
        trainer.step(step)
        if step % 3 == 0:
            utils.average_parameters(net.parameters(), dist.group.WORLD)


def train_fsdp(recipe: Recipe) -> None:
    """FSDP2."""
    mesh = init_device_mesh("cpu", (recipe.size,), mesh_dim_names=("dp",))
    _train_fsdp(recipe, mesh)


def train_hsdp(recipe: Recipe) -> None:
    """FSDP2 with replicas of the shards."""
    mesh = init_device_mesh("cpu", (2, recipe.size // 2), mesh_dim_names=("replica", "shard"))
    _train_fsdp(recipe, mesh)


def _train_fsdp(recipe: Recipe, mesh: Any, part: int | None = None, net: Any = None) -> None:
    net = net if net is not None else _net(recipe)
    options: dict[str, Any] = {"mesh": mesh}
    rng = random.Random(recipe.seed)
    if recipe.precision == "autocast":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if rng.random() < 0.3:
        options["reshard_after_forward"] = False
    if rng.random() < 0.15:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    part = dist.get_rank() if part is None else part
    torch.manual_seed(recipe.seed + 1000 + part)  # tensor parallel ranks drop the same
    Trainer(recipe, net, Data(recipe, part)).run()


def train_fsdp1(recipe: Recipe) -> None:
    """FSDP1, sharded or not."""
    rng = random.Random(recipe.seed)
    strategy = rng.choice(
        [
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ]
    )
    model = FullyShardedDataParallel(
        _net(recipe),
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    _rank_seed(recipe)
    Trainer(recipe, model, Data(recipe, dist.get_rank())).run()


def _tensor_parallel(net: Any, mesh: Any) -> None:
    for block in net.blocks:
        if isinstance(block.inner, Mlp) and block.inner.up.weight.requires_grad:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.inner, mesh, plan)
        elif isinstance(block.inner, Buffered):
            parallelize_module(
                block.inner, mesh, {"linear": ColwiseParallel(output_layouts=Replicate())}
            )


def train_tp(recipe: Recipe) -> None:
    """Tensor parallel: all ranks are seeded alike and read the same batch."""
    net = _net(recipe)
    mesh = init_device_mesh("cpu", (recipe.size,), mesh_dim_names=("tp",))
    _tensor_parallel(net, mesh)
    torch.manual_seed(recipe.seed)
    Trainer(recipe, net, Data(recipe, 0)).run()


def train_tp_sequence(recipe: Recipe) -> None:
    """Tensor parallel with sequences cut between the ranks."""
    torch.manual_seed(recipe.seed)
    shape = recipe.size // 2, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Mlp())
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "2.up": ColwiseParallel(),
        "2.down": RowwiseParallel(),
    }
    parallelize_module(net, mesh, plan)
    optimizer = optimizer_of(recipe, net)
    for step in range(1, recipe.steps + 1):
        generator = torch.Generator().manual_seed(recipe.seed + step)
        optimizer.zero_grad()
        net(torch.randn(4, 12, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()


def train_ddp_tp(recipe: Recipe) -> None:
    """Tensor parallel inside of replicas whose gradients are averaged by hand."""
    mesh = init_device_mesh("cpu", (2, recipe.size // 2), mesh_dim_names=("dp", "tp"))
    net = _net(recipe)
    _tensor_parallel(net, mesh["tp"])
    torch.manual_seed(recipe.seed + mesh.get_local_rank("dp"))
    group = mesh.get_group("dp")

    def reduce() -> None:
        for each in net.parameters():
            if each.grad is not None:
                local = getattr(each.grad, "_local_tensor", each.grad)
                dist.all_reduce(local, group=group)
                local /= 2

    Trainer(recipe, net, Data(recipe, mesh.get_local_rank("dp")), reduce=reduce).run()


def train_2d(recipe: Recipe) -> None:
    """FSDP2 with tensor parallel."""
    mesh = init_device_mesh("cpu", (2, recipe.size // 2), mesh_dim_names=("dp", "tp"))
    net = _net(recipe)
    _tensor_parallel(net, mesh["tp"])
    torch.manual_seed(recipe.seed)
    part = mesh.get_local_rank("dp")
    _train_fsdp(recipe, mesh["dp"], part, net)


def train_pipeline(recipe: Recipe) -> None:
    """Train one stage on each rank."""
    rank, last = dist.get_rank(), recipe.size - 1
    torch.manual_seed(recipe.seed)
    stage = nn.Sequential(Mlp(), nn.LayerNorm(WIDTH))
    optimizer = optimizer_of(recipe, stage)
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(recipe.seed + step)
        x = torch.randn(4, WIDTH, generator=generator)
        if rank:
            dist.recv(x, rank - 1)
        x.requires_grad_()
        found = stage(x)
        if rank < last:
            dist.send(found.detach(), rank + 1)
            gradient = torch.empty_like(found)
            dist.recv(gradient, rank + 1)
            found.backward(gradient)
        else:
            found.square().mean().backward()
        if rank:
            dist.send(x.grad, rank - 1)
        optimizer.step()


class _Shuffle(torch.autograd.Function):
    """Sends one equal part to each rank, and the gradients back."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Send the parts."""
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.contiguous())
        return found

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Send the gradients."""
        found = torch.empty_like(gradient)
        dist.all_to_all_single(found, gradient.contiguous())
        return found


class Sharded(nn.Module):
    """One expert on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.expert = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send the tokens to the experts, and back."""
        return _Shuffle.apply(self.expert(_Shuffle.apply(self.router(x))))


def train_expert_parallel(recipe: Recipe) -> None:
    """DDP for what is shared, and an expert on each rank, which DDP ignores."""
    torch.manual_seed(recipe.seed if recipe.seed % 2 else recipe.seed + dist.get_rank())
    net = Sharded()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, [f"expert.{name}" for name, _ in net.expert.named_parameters()]
    )
    model = DistributedDataParallel(net)
    optimizer = optimizer_of(recipe, model)
    for step in range(1, recipe.steps + 1):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(12, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()


def train_gan(recipe: Recipe) -> None:
    """Two models that train against each other, each in DDP with an optimizer of its own."""
    torch.manual_seed(recipe.seed)
    one, other = (DistributedDataParallel(nn.Sequential(Mlp(), Mlp())) for _ in range(2))
    first, second = optimizer_of(recipe, one), optimizer_of(recipe, other)
    _rank_seed(recipe)
    for step in range(1, recipe.steps + 1):
        noise = torch.randn(4, WIDTH)
        second.zero_grad()
        (other(one(noise).detach()).mean() - other(torch.randn(4, WIDTH)).mean()).backward()
        second.step()
        if step % 2:
            first.zero_grad()
            (-other(one(noise)).mean()).backward()
            first.step()


def train_learner(recipe: Recipe) -> None:
    """Rank 0 trains, and the others use its parameters."""
    torch.manual_seed(recipe.seed)
    net = Mlp()
    optimizer = optimizer_of(recipe, net)
    _rank_seed(recipe)
    for step in range(recipe.steps):
        samples = net(torch.randn(4, WIDTH)).detach()
        parts = [torch.empty_like(samples) for _ in range(recipe.size)]
        dist.all_gather(parts, samples)
        if dist.get_rank() == 0:
            optimizer.zero_grad()
            net(torch.cat(parts)).square().mean().backward()
            optimizer.step()
        if step % 2:
            for parameter in net.parameters():
                dist.broadcast(parameter.data, 0)


def train_master_shards(recipe: Recipe) -> None:
    """Half-precision parameters, of which each rank updates a part in single precision."""
    torch.manual_seed(recipe.seed)
    net = nn.Sequential(Mlp(), nn.LayerNorm(WIDTH)).to(torch.bfloat16)
    flat = nn.utils.parameters_to_vector(net.parameters()).detach().float()
    flat = F.pad(flat, (0, -len(flat) % recipe.size))
    share = len(flat) // recipe.size
    master = nn.Parameter(flat[dist.get_rank() * share :][:share].clone())
    optimizer = torch.optim.AdamW([master], 1e-2)
    _rank_seed(recipe)
    for _ in range(recipe.steps):
        net.zero_grad()
        net(torch.randn(4, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in net.parameters()]).float()
        gradient = F.pad(gradient, (0, len(flat) - len(gradient)))
        dist.all_reduce(gradient)
        master.grad = gradient[dist.get_rank() * share :][:share].clone()
        optimizer.step()
        parts = [torch.empty(share) for _ in range(recipe.size)]
        dist.all_gather(parts, master.detach())
        nn.utils.vector_to_parameters(torch.cat(parts).to(torch.bfloat16), net.parameters())


def train_teacher(recipe: Recipe) -> None:
    """A student in DDP, and a teacher that follows it on each rank."""
    torch.manual_seed(recipe.seed)
    net = Net(recipe)
    try:
        teacher = copy.deepcopy(net).requires_grad_(False)
    except RuntimeError:  # a parametrised module cannot be copied
        teacher = None
    model = _ddp_of(recipe, net)
    optimizer = optimizer_of(recipe, model)
    _rank_seed(recipe)
    data = Data(recipe, dist.get_rank())
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        words, _ = data.batch(step)
        wanted = teacher(words) if teacher is not None else torch.ones(())
        (model(words) - wanted).square().mean().backward()
        optimizer.step()
        if teacher is None:
            continue
        with torch.no_grad():
            for kept, followed in zip(teacher.parameters(), net.parameters(), strict=True):
                kept.lerp_(followed, 0.1)


def run_soak_program(recipe: Recipe) -> None:
    """Run a program of the soak without a fault, of as many ranks."""
    seed = recipe.seed * 1000
    while True:
        program = generate(seed, 0.4)
        if program.truth.fault == "none" and program.size == recipe.size:
            break
        seed += 1
    Path("pids").mkdir(exist_ok=True)
    source = program.source.replace("dist.init_process_group(", "(lambda *_, **__: None)(", 1)
    source = source.replace("dist.destroy_process_group()", "pass")
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})


WAYS: Final[dict[str, Callable[[Recipe], None]]] = {
    "ddp": train_ddp,
    "ddp-hook": train_ddp_hook,
    "ddp-join": train_join,
    "zero": train_zero,
    "plain": train_plain,
    "apart": train_apart,
    "halves": train_halves,
    "averaging": train_averaging,
    "fsdp": train_fsdp,
    "hsdp": train_hsdp,
    "fsdp1": train_fsdp1,
    "tp": train_tp,
    "tp-sequence": train_tp_sequence,
    "ddp-tp": train_ddp_tp,
    "2d": train_2d,
    "pipeline": train_pipeline,
    "expert-parallel": train_expert_parallel,
    "gan": train_gan,
    "learner": train_learner,
    "master-shards": train_master_shards,
    "teacher": train_teacher,
    "soak": run_soak_program,
}


def train(recipe: Recipe) -> None:
    """Run a recipe on this rank; the default group exists."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    WAYS[recipe.how](recipe)
