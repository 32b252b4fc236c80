"""Mixture of experts: a gate sends every token to one or two of many feed-forward networks.

Top-1: Fedus, Zoph and Shazeer 2022, Switch Transformers (arXiv 2101.03961). Top-2: Lepikhin et al. 2021, GShard (arXiv
2006.16668); unlike GShard, a second choice is dropped only when the expert is full. The module runs on one device. On
several, `exchange` makes the ranks that share a microbatch route it as one device would.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tutti.errors import ScriptError

Activation = Literal["relu", "gelu", "silu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the ranks that share a microbatch know about each other's tokens.

    Attributes:
        counts: (ranks, top_k, experts), int64 on the CPU: number of tokens whose first, second choice is an expert.
        rank: this rank's row of `counts`.
        probability_sums: (experts,), the gate's probabilities, summed over the tokens of all ranks, with gradient.
    """

    counts: Tensor
    rank: int
    probability_sums: Tensor

    @property
    def tokens(self) -> int:
        return int(self.counts[:, 0].sum())

    def kept(self, capacity: int | None) -> Tensor:
        """Return how many of `counts` fit into the experts' capacity.

        An expert takes `capacity` tokens: all first choices before any second one, each in the order of the microbatch
        (ranks in order, and tokens in order within a rank).
        """
        if capacity is None:
            return self.counts
        ranks, choices, experts = self.counts.shape
        queue = self.counts.transpose(0, 1).reshape(choices * ranks, experts)
        before = queue.cumsum(0) - queue
        fits = torch.minimum((capacity - before).clamp(min=0), queue)
        return fits.reshape(choices, ranks, experts).transpose(0, 1)


@dataclass(slots=True)
class Tally:
    """Counters of one mixture during training since `take_tallies`, over all ranks that share a microbatch.

    Attributes:
        assigned: number of choices.
        dropped: choices that exceeded an expert's capacity.
        passes: forward passes.
        balance: sum of the load-balancing losses of these passes.
    """

    assigned: int = 0
    dropped: int = 0
    passes: int = 0
    balance: Tensor | float = 0.0

    @property
    def balance_loss(self) -> float:
        """The mean load-balancing loss of a forward pass; 1 when balanced."""
        return float(self.balance) / max(self.passes, 1)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on a device, without waiting for what an accelerator still computes."""
    if device.type == "cpu":
        return tensor
    if not tensor.numel():  # there is no pinned memory of no bytes
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def count_choices(choices: Tensor, experts: int) -> Tensor:
    """How often each row of `choices`, (n, tokens), has each expert: (n, experts), int64."""
    if choices.device.type == "cpu":
        return torch.stack([torch.bincount(choice, minlength=experts) for choice in choices])
    counts = torch.zeros(len(choices), experts, dtype=torch.int64, device=choices.device)
    return counts.scatter_add_(1, choices, torch.ones_like(choices))


class ExpertExchange(Protocol):
    """How a mixture communicates with the ranks that share its microbatch.

    `recomputing`: whether forward runs again within backward.
    """

    @property
    def recomputing(self) -> bool: ...

    def agree(self, counts: Tensor, probability_sums: Tensor, *, training: bool) -> Routing:
        """Agree on the microbatch's routing.

        Args:
            counts: this rank's counts, (top_k, experts).
            probability_sums: this rank's sums of probabilities, (experts,).
            training: whether the mixture is in training mode.
        """

    def compute(self, experts: "Experts", rows: Tensor, kept: Tensor) -> Tensor:
        """Compute `rows` (n, width), ordered by expert, wherever the experts are; `kept`: (ranks, experts)."""


class Experts(Protocol):
    """What an exchange needs of a mixture: computing rows that are ordered by expert."""

    def run_experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor: ...


class SingleDevice:
    """The exchange of one device: there is nothing to exchange."""

    @property
    def recomputing(self) -> bool:
        return False

    def agree(self, counts: Tensor, probability_sums: Tensor, *, training: bool) -> Routing:
        return Routing(counts=counts.cpu()[None], rank=0, probability_sums=probability_sums)

    def compute(self, experts: Experts, rows: Tensor, kept: Tensor) -> Tensor:
        return experts.run_experts(rows, kept[0].tolist())


class MixtureOfExperts(nn.Module):
    """Mixture of experts, (..., width) -> (..., width): each token goes to the `top_k` experts its gate prefers.

    Top-1 weights an expert's result by the gate's probability, top-2 by the two probabilities normalised to 1. While
    training, an expert takes ceil(capacity_factor * top_k * tokens / experts) tokens of the microbatch, over all ranks
    that share it: first choices before second ones, each in the microbatch's order. A token beyond an expert's capacity
    gets 0 from it, so put a residual connection around the module. In evaluation, and with capacity_factor=None,
    nothing is dropped.

    Parameters: `gate.weight` (experts, width), `input_weight` (experts, width, hidden), `input_bias` (experts, hidden),
    `output_weight` (experts, hidden, width), `output_bias` (experts, width). The gate computes in its parameters' own
    precision, also under autocast (Switch, section 2.4).

    Args:
        width: size of a token's vector.
        hidden: hidden size of each expert.
        experts: number of experts.
        top_k: 1 or 2.
        capacity_factor: capacity of an expert, relative to an even share of the choices; None for no limit.
        activation: function between an expert's two layers.
        bias: whether the layers have biases.
        device, dtype: of the parameters.

    Attributes:
        auxiliary_loss: load-balancing loss of the last forward. While training, it is experts * sum(f_i P_i) (Switch,
            equation 4). f_i is the fraction of the microbatch's tokens whose first choice is expert i, and P_i the mean
            probability of expert i. It is 1 when balanced, and 0 in evaluation. Add it to the loss, times a coefficient
            (Switch: 0.01): see `auxiliary_loss(model)`.
        assigned: number of choices of the microbatch's tokens in the last forward.
        dropped: how many of them exceeded an expert's capacity.

    Raises:
        ScriptError: an argument is invalid.

    Examples:
        >>> mixture = MixtureOfExperts(16, 64, experts=4, top_k=2)
        >>> mixture(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        top_k: int = 1,
        capacity_factor: float | None = 1.25,
        activation: Activation = "relu",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(experts, top_k, capacity_factor, activation)
        self.width, self.hidden, self.experts, self.top_k = width, hidden, experts, top_k
        self.capacity_factor, self.activation = capacity_factor, activation
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = nn.Linear(width, experts, bias=False, **factory_kwargs)
        self.input_weight = nn.Parameter(torch.empty(experts, width, hidden, **factory_kwargs))
        self.output_weight = nn.Parameter(torch.empty(experts, hidden, width, **factory_kwargs))
        self.input_bias = nn.Parameter(torch.empty(experts, hidden, **factory_kwargs)) if bias else None
        self.output_bias = nn.Parameter(torch.empty(experts, width, **factory_kwargs)) if bias else None
        self.exchange: ExpertExchange = SingleDevice()
        self.auxiliary_loss = torch.zeros(())
        self.assigned = self.dropped = 0
        self.tally = Tally()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters uniformly from +-1 / sqrt(inputs), as nn.Linear does."""
        pairs = ((self.input_weight, self.input_bias), (self.output_weight, self.output_bias))
        for weight, bias in pairs:
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.hidden}, experts={self.experts}, top_k={self.top_k}"

    def capacity(self, tokens: int) -> int | None:
        """Return how many tokens each expert takes of a microbatch of `tokens`; None for all."""
        if self.capacity_factor is None or not self.training:
            return None
        return max(math.ceil(self.capacity_factor * self.top_k * tokens / self.experts), 1)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.width)
        with torch.autocast("cpu" if rows.is_meta else rows.device.type, enabled=False):
            probabilities = F.softmax(self.gate(rows.to(self.gate.weight.dtype)), dim=-1)
        choices, weights = self._choose(probabilities)
        if rows.is_meta or isinstance(rows, FakeTensor):
            kept, slots = self._shapes(rows, probabilities)
            exchange: ExpertExchange = self.exchange if rows.is_meta else SingleDevice()
        else:
            kept, slots = self._route(choices, probabilities)
            exchange = self.exchange
        results = exchange.compute(self, rows.index_select(0, slots % len(rows)), kept)
        weighted = results * weights.reshape(-1).index_select(0, slots).unsqueeze(1).to(results.dtype)
        output = torch.zeros_like(rows, dtype=weighted.dtype).index_add(0, slots % len(rows), weighted)
        return output.reshape(input.shape).to(input.dtype)

    def run_experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Run each of this rank's experts on its rows.

        Args:
            rows: (n, width), ordered by expert.
            sizes: number of rows of each expert on this rank.

        Returns:
            (n, width), in the same order.
        """
        activation = _ACTIVATIONS[self.activation]
        parts = zip(
            torch.split(rows, list(sizes)),
            self.input_weight.unbind(),
            _unbound(self.input_bias, len(sizes)),
            self.output_weight.unbind(),
            _unbound(self.output_bias, len(sizes)),
            strict=True,
        )
        return torch.cat([_affine(activation(_affine(part, w, b)), v, c) for part, w, b, v, c in parts])

    def _choose(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts (top_k, tokens), in order of preference, and the weights (top_k, tokens) of their results."""
        first = probabilities.argmax(-1)
        if self.top_k == 1:
            choices = first[None]
            return choices, probabilities.gather(1, choices.t()).t()
        rest = probabilities.detach().scatter(1, first.unsqueeze(1), -1.0)
        choices = torch.stack([first, rest.argmax(-1)])
        weights = probabilities.gather(1, choices.t()).t()
        return choices, weights / weights.sum(0, keepdim=True)

    def _route(self, choices: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Find which choices fit into the experts' capacity.

        Returns:
            How many choices every rank's tokens keep, (ranks, experts); and this rank's kept choices ordered by expert,
            each as choice * tokens + token.
        """
        counts = count_choices(choices, self.experts)
        routing = self.exchange.agree(counts, probabilities.sum(0), training=self.training)
        kept = routing.kept(self.capacity(routing.tokens))
        self._update_counters(routing, int(kept.sum()))
        expert = choices.reshape(-1)
        slots = torch.argsort(expert, stable=True)  # by expert, then by choice, then by token
        group = expert[slots] * self.top_k + slots.div(choices.shape[1], rounding_mode="floor")
        sizes = counts.t().reshape(-1)
        position = torch.arange(len(slots), device=slots.device) - (sizes.cumsum(0) - sizes)[group]
        fits = on_device(kept[routing.rank].t().reshape(-1), slots.device)
        there = position < fits[group]
        if slots.device.type == "cpu":
            return kept.sum(1), slots[there]
        # indexing by a mask would wait for an accelerator, although the host knows how many there are
        return kept.sum(1), slots[torch.argsort(~there, stable=True)[: int(kept[routing.rank].sum())]]

    def _update_counters(self, routing: Routing, kept: int) -> None:
        """Update the load-balancing loss and the counters. Forward within backward (recompute) counts nothing again."""
        total = int(routing.counts.sum())
        if not self.exchange.recomputing:
            self.assigned, self.dropped = total, total - kept
            self.tally.assigned += self.assigned * self.training
            self.tally.dropped += self.dropped * self.training
        if not self.training:
            self.auxiliary_loss = torch.zeros(
                (), dtype=routing.probability_sums.dtype, device=routing.probability_sums.device
            )
            return
        sums = routing.probability_sums
        first = on_device(routing.counts[:, 0].sum(0).to(sums.dtype), sums.device)
        self.auxiliary_loss = (first * routing.probability_sums).sum() * (self.experts / max(routing.tokens, 1) ** 2)
        if not self.exchange.recomputing:
            self.tally.passes += 1
            self.tally.balance = self.tally.balance + self.auxiliary_loss.detach()

    def _shapes(self, rows: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Route tensors without values: every expert gets an equal share, as far as its capacity allows."""
        self.auxiliary_loss = probabilities.sum() / len(rows) if self.training else probabilities.new_zeros(())
        even_share = len(rows) * self.top_k // self.experts
        size = min(even_share, self.capacity(len(rows)) or even_share)
        kept = torch.full((1, self.experts), size, device="cpu")
        return kept, torch.empty(size * self.experts, dtype=torch.int64, device=rows.device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loss of the last forward pass: a copied or saved model has none."""
        return {**self.__dict__, "auxiliary_loss": torch.zeros(())}


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixtures of experts within `model`."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Add up the load-balancing losses of all mixtures in `model`, from their last forward pass.

    Use it in the loss function: `loss + 0.01 * auxiliary_loss(model)`. The loss covers the whole microbatch, and is the
    same on all ranks that share it. If a forward pass calls a mixture twice, only the last call counts.

    Raises:
        ScriptError: the model has no MixtureOfExperts.

    Examples:
        >>> mixture = MixtureOfExperts(16, 64, experts=4)
        >>> output = mixture(torch.randn(2, 5, 16))
        >>> loss = output.square().mean() + 0.01 * auxiliary_loss(mixture)
    """
    losses = [module.auxiliary_loss for module in mixtures(model)]
    if not losses:
        raise ScriptError("auxiliary_loss got a model without a MixtureOfExperts; leave this term out of the loss")
    return torch.stack([loss.to(losses[-1].device) for loss in losses]).sum()


def take_tallies(model: nn.Module) -> dict[str, Tally]:
    """Return what the mixtures of `model` counted since the last call, by module name, and reset their counters."""
    by_name = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    tallies = {name: module.tally for name, module in by_name.items()}
    for module in by_name.values():
        module.tally = Tally()
    return tallies


def _check(experts: int, top_k: int, capacity_factor: float | None, activation: str) -> None:
    if top_k not in (1, 2) or experts < top_k:
        raise ScriptError(
            f"MixtureOfExperts: top_k = {top_k} of {experts} experts; use 1 or 2, and at least as many experts"
        )
    if capacity_factor is not None and not capacity_factor > 0:
        raise ScriptError(f"MixtureOfExperts: capacity_factor = {capacity_factor}; give a number above 0, or None")
    if activation not in _ACTIVATIONS:
        raise ScriptError(f"MixtureOfExperts: activation = {activation!r}; use {', '.join(_ACTIVATIONS)}")


def _unbound(bias: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if bias is None else bias.unbind()


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)
