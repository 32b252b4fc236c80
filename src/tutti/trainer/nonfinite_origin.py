"""Finds the module in which the first value that is not finite arises: the failed batch is computed once more.

Every rank computes its part of the batch again with the same random draws, in step with the others, because forwards
may communicate. Hooks look at what modules get and return, and at the gradients of both. Nothing is changed.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from tutti.data.device_copies import to_device
from tutti.data.seeds import seed_device
from tutti.errors import TrainingError
from tutti.nn.mixture import take_tallies
from tutti.parallel.data.batch_state import exchanges_state
from tutti.parallel.data.batchnorm import is_batch_norm
from tutti.parallel.losses import as_weighted
from tutti.parallel.mixed_precision import autocast
from tutti.trainer.guard.findings import OTHER_FORWARDS, WHOLE_NUMEL, has_whole_modules, kept_by, model_is_local
from tutti.trainer.run_state import Run
from tutti.trainer.step_message import ComputedBatch, StepMessage
from tutti.trainer.traceless import untouched
from tutti.trainer.whole_weights import whole_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a rank's first value that is not finite arises.

    Attributes:
        words: a clause that names the module, the loss function or the batch.
        samples: the samples whose values are not finite; empty where that cannot be told.
        losses: this rank's loss of each microbatch.
    """

    words: str = ""
    samples: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()


def find_origins(run: Run, message: StepMessage, *, of_gradients: bool) -> list[Origin]:
    """Compute a batch again and return, for each rank, where its first value that is not finite arises. Collective.

    Args:
        run: the run; its parameters are as they were when the batch was computed.
        message: of the step, with what was computed.
        of_gradients: whether backward is repeated, too.

    Returns:
        An origin per rank, without words where nothing was found; an empty list where the plan does not allow it.

    Raises:
        TrainingError: on this rank, if it cannot compute the batch again and other ranks wait for it in forward.
    """
    batch = message.computed
    if batch is None or run.state.consistency.asynchronous:
        return []
    whole = run.parallel.mesh.degree("stage") > 1 or (has_whole_modules(run) and not model_is_local(run))
    if whole and run.parallel.layout.parameters > WHOLE_NUMEL:
        return []
    if of_gradients and not (whole or has_whole_modules(run)):
        return []
    origin = Origin()
    with whole_model(run) if whole else nullcontext():
        try:
            origin = _origin(run, batch, message, of_gradients=of_gradients)
        except Exception as error:  # the script's own code, called once more
            if _forward_exchanges(run, whole=whole):
                raise TrainingError(
                    f"step {message.place.step}: {'a gradient' if of_gradients else 'the loss'} is not finite or far "
                    f"too large, and rank {run.parallel.world.rank} failed when the batch was computed again to find "
                    f"where that arises ({type(error).__name__}: {error}), while other ranks wait for it in forward; "
                    "let forward and the loss compute the same batch twice"
                ) from error
            origin = Origin()
        finally:
            take_tallies(run.parallel.model)
    return run.loop.watch.gather("values that are not finite", origin)


def _forward_exchanges(run: Run, *, whole: bool) -> bool:
    """Whether ranks wait for each other in the forward of a model, as it is or with whole weights."""
    mesh, scope = run.parallel.mesh, run.parallel.scope
    if mesh.degree(*OTHER_FORWARDS) > 1 or (mesh.degree("split") > 1 and not whole):
        return True
    return scope.degree > 1 and any(is_batch_norm(m) or exchanges_state(m) for m in run.parallel.model.modules())


def _origin(run: Run, batch: ComputedBatch, message: StepMessage, *, of_gradients: bool) -> Origin:
    model, found, losses = run.parallel.model, Origin(), []
    with untouched(model, kept_by(batch.loss, model)), run.parallel.gradient_hooks.set_aside():
        for index, part in enumerate(batch.share.parts):
            search = _Search(model)
            with search.hooks(), torch.set_grad_enabled(of_gradients):
                losses.append(_computed(run, batch, index, message, search))
            if part.count and search.place and not found.words:
                rows = [row for row in search.rows if row < part.count] if search.size == part.loaded else []
                indices = message.indices[[part.start + row for row in rows]] if rows and len(message.indices) else ()
                found = Origin(words=search.place, samples=tuple(map(int, indices)))
    return Origin(words=found.words, samples=found.samples, losses=tuple(losses))


def _computed(run: Run, batch: ComputedBatch, index: int, message: StepMessage, search: "_Search") -> float:
    """Compute the loss of one microbatch, and its gradients if they are searched; return the loss."""
    model, device, part = run.parallel.model, run.parallel.world.device, batch.share.parts[index]
    call = (message.place.call,) if message.place.call else ()
    seed_device(run.parallel.draws_seed(message.place.step - 1, index, call), device)
    run.parallel.scope.counts = part.count > 0
    with ExitStack() as stack:
        local = stack.enter_context(run.parallel.sequences.part(to_device(batch.pieces[index], device)))
        with autocast(run.parallel.plan.precision, device), run.parallel.reads.active():
            value = as_weighted(batch.loss(model, local), part.loaded, batch.share.batch_size)
            scaled = value.total / max(float(value.count), 1.0)
        loss = float(scaled.detach())
        if not search.place and loss - loss != 0:
            search.place = "what modules return is finite, so it arises in the loss function"
        if torch.is_grad_enabled() and part.count and not search.place:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(scaled, trained, allow_unused=True)
            search.gradients(trained, gradients)
    return loss


@dataclass(slots=True)
class _Search:
    """Looks at what modules get and return, and at the gradients of both.

    Attributes:
        model: the model.
        place: a clause that says where the first value that is not finite arises; empty while none was seen.
        rows: rows of the tensor in which it was seen that have such values, if some have none.
        size: length of that tensor's first dimension.
    """

    model: nn.Module
    place: str = ""
    rows: list[int] = field(default_factory=list)
    size: int = 0
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _calls: list[nn.Module] = field(default_factory=list)
    _places: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {module: name for name, module in self.model.named_modules()}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Within the context, look at every call of a module of the model."""
        handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
        """Look at the gradients of parameters, if no activation's gradient was seen not to be finite."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not self.place and gradient is not None and _bad(gradient, masks=False):
                owner = names[parameter].rpartition(".")[0]
                self.place = f"it arises in the backward of {self._describe(self.model.get_submodule(owner))}"

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        if module not in self._names:
            return None
        for tensor in _tensors(arguments):
            if not self.place and _bad(tensor, masks=True):  # -inf is what masks of attention hold
                caller = self._calls[-1] if self._calls else None
                self.place = (
                    "the model's input has such values already"
                    if caller is None
                    else f"it arises in the forward of {self._describe(caller)}, before it calls "
                    f"{self._names[module]!r}"
                )
                self._note_rows(tensor)
        weights = next((name for name, own in module.named_parameters(recurse=False) if _bad(own, masks=False)), None)
        if not self.place and weights is not None:
            self.place = f"the parameter {weights!r} of {self._describe(module)} is not finite already"
        self._calls.append(module)
        return self._followed(arguments, f"it arises in the backward of {self._describe(module)}")

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if module not in self._names:
            return None
        self._calls.pop()
        for tensor in _tensors(output):
            if not self.place and _bad(tensor, masks=False):
                self.place = f"it arises in the forward of {self._describe(module)}"
                self._note_rows(tensor)
        caller = self._calls[-1] if self._calls else None
        where = "the loss function" if caller is None else self._describe(caller)
        return self._followed(output, f"it arises in the backward of {where}")

    def _followed(self, values: Any, place: str) -> Any:
        """Return aliases of tensors whose gradients are looked at on their own; None where there are none."""
        if not torch.is_grad_enabled():
            return None
        leaves, tree = pytree.tree_flatten(values)
        followed = [self._alias(leaf, place) if _differentiable(leaf) else leaf for leaf in leaves]
        if all(new is old for new, old in zip(followed, leaves, strict=True)):
            return None
        return pytree.tree_unflatten(followed, tree)

    def _alias(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        alias = tensor.view_as(tensor)

        def look(gradient: torch.Tensor) -> None:
            if not self.place and _bad(gradient, masks=False):
                self.place = place
                self._note_rows(gradient)

        alias.register_hook(look)  # type: ignore[no-untyped-call]
        return alias

    def _describe(self, module: nn.Module) -> str:
        name, kind = self._names[module], type(module).__name__
        return f"module {name!r} ({kind})" if name else f"the model ({kind})"

    def _note_rows(self, tensor: torch.Tensor) -> None:
        """Note which rows are not finite, unless all are."""
        if tensor.dim():
            bad = ~torch.isfinite(tensor.detach().reshape(len(tensor), -1)).all(dim=1)
            self.size = len(tensor)
            self.rows = [] if bool(bad.all()) and len(tensor) > 1 else bad.nonzero()[:, 0].tolist()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _differentiable(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.requires_grad and not leaf.is_leaf


def _bad(tensor: torch.Tensor, *, masks: bool) -> bool:
    """Whether a tensor has a value that is not finite; minus infinity is none where masks hold it."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return False
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        values = tensor.detach()
        bad = values.isnan() | values.isposinf() if masks else ~values.isfinite()
        return bool(bad.any())


def named_samples(samples: Sequence[int], most: int = 16) -> str:
    """Return the numbers of samples, the first of many."""
    more = f" and {len(samples) - most} more" if len(samples) > most else ""
    return f"{', '.join(map(str, samples[:most]))}{more}"
