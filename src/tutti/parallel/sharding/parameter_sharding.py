"""Sharding levels 2 and 3: parameters, gradients and optimizer state are divided among the ranks of `shard`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.config.plan import Plan, ShardingPlan
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.optim.optimizer_traits import check_takes_parts, check_updates_on_host
from tutti.parallel.layout import Layout
from tutti.parallel.offload.offloaded_pack import HostState, OffloadedPack
from tutti.parallel.sharding.optimizer_state_sharding import States
from tutti.parallel.sharding.saved_weights import SavedTensorHooks, WeightKeeper, in_backward
from tutti.parallel.sharding.shard_collectives import ShardGroup, SharedSegments
from tutti.parallel.sharding.sharded_gradients import CompressedSum, Shards, Sums, uncompiled
from tutti.parallel.sharding.sharded_unit import Pack, Sharded, Unit, make_units


class Parameters(Shards):
    """Sharded parameters: `GatherHooks` gathers them while a block computes, `Sums` reduces their gradients."""

    gathers_in_forward = True

    def __init__(
        self, model: nn.Module, layout: Layout, sharding: ShardingPlan, offload: HostState | None = None
    ) -> None:
        mesh = layout.mesh
        units, blocks = make_units(model, layout, offload)
        self.layout, self.units = layout, units
        self._packs = [pack for unit in units for pack in unit.packs]  # `units` will change its order
        self._sent_nbytes = 0
        self._learned = False
        self._offloaded = [pack for pack in self._packs if isinstance(pack, OffloadedPack)]
        self._leaves_early = mesh.degree("shard") == 1 and not any(pack.others for pack in self._packs)
        divided = mesh.degree("shard") > 1
        keep = sharding.level == 2 if divided or offload is None else offload.resident
        self._passes = GatherHooks(model, units, blocks, keep=keep)
        self._passes.opening = self._refresh
        self._gathering = self._passes.gathering
        if divided:
            self._gathering.meet(_meet(mesh.new_group("shard"), layout.channel("parameters", "shard"), self._offloaded))
        self._sums = Sums(self._sending_order(), self._shard_groups())
        if offload is not None:
            _move_rest(model, self._packs, offload.device)

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes

    def memory(self) -> list[torch.Tensor]:
        return [pack.flat for unit in self.units for pack in unit.packs if pack.flat.is_meta]

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        for unit in self.units:
            for pack in unit.packs:
                if pack.flat.is_meta:
                    pack.materialise(real(pack.flat), device)
            unit.show("shard")

    def parts(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {p.name: (p.shard, p.absent) for pack in self._packs for p in pack.parameters}

    def whole_versions(self) -> dict[str, int]:
        return {unit.name: max((p.whole._version for p in unit.parameters), default=0) for unit in self.units}

    def packs(self) -> list[Pack]:
        return self._packs

    def sum_by(self, coded: Mapping[Pack, CompressedSum]) -> None:
        self._sums.coded = coded

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if self.layout.mesh.degree("shard") > 1:
                check_takes_parts(optimizer)
            if self._offloaded:
                check_updates_on_host(optimizer)

    def rest(self) -> None:
        self._passes.release()

    def gather_for_loss(self, name: str) -> None:
        for unit in self.units:
            if not unit.whole and any(parameter.name == name for parameter in unit.parameters):
                self._passes.stray(unit)

    @contextmanager
    def loss_reads(self) -> Iterator[None]:
        if self._passes.in_step:
            yield
            return
        self._passes.in_step = True  # an evaluation
        try:
            yield
        finally:
            self._passes.in_step = False
            self._passes.release()

    def clear(self) -> None:
        self._passes.begin_step()
        self._refresh()
        for pack in self._offloaded:
            pack.begin_gradients()
        if self._offloaded and self._leaves_early:  # gradients leave in every microbatch
            self._sums.open()
            self._passes.complete, self._passes.ended = self._sums.complete, self._sums.drain

    def begin(self) -> None:
        if not self._learned and self._packs:
            self._learn(self._packs[0].device)
        self._sums.open()
        self._passes.complete, self._passes.ended = self._sums.complete, None

    def send(self) -> None:
        self._passes.complete = None
        self._passes.release()
        for unit in self.units:
            for parameter in unit.parameters:
                if parameter.shard.grad is not None:
                    raise ScriptError(
                        f"the loss uses parameter {parameter.name!r} outside of the modules' forward, where a rank "
                        "sees only its part; use the optimizer's weight decay instead of a penalty, or sharding level 1"
                    )
        self._sums.check_all_sent()
        self._sums.send()

    def finish(self) -> None:
        self._sums.finish()
        self._passes.end_step()
        self._sent_nbytes = self._gathering.sent_nbytes + self._sums.sent_nbytes
        self._gathering.sent_nbytes = self._sums.sent_nbytes = 0

    def _shard_groups(self) -> dict[tuple[AxisName, ...], ShardGroup]:
        """The groups that reduce gradients: `shard`, and each pack's other axes; all ranks open them in one order."""
        layout, mesh = self.layout, self.layout.mesh
        shard_groups: dict[tuple[AxisName, ...], ShardGroup] = {}
        channel = layout.channel("gradients", "shard")
        if mesh.degree("shard") > 1:
            shard_groups[("shard",)] = _meet(mesh.new_group("shard"), channel, self._offloaded)
        else:
            shard_groups[("shard",)] = ShardGroup(None, channel)
        for axes in sorted({pack.others for unit in self.units for pack in unit.packs if pack.others}):
            shard_groups[axes] = _meet(mesh.group(*axes), layout.channel("gradients", *axes), self._offloaded)
        return shard_groups

    def _refresh(self) -> None:
        """What the host holds may have changed."""
        for pack in self._offloaded:
            pack.refresh()

    def _sending_order(self) -> list[Unit]:
        """The order in which units are reduced: that of backward; parameters outside of blocks come last."""
        return [*self._passes.units[:0:-1], self._passes.units[0]]

    def _learn(self, device: torch.device) -> None:
        """After the first forward: gather units in the order in which the first of the exchanging ranks ran them."""
        mesh, count = self.layout.mesh, len(self.units)
        others = {axis for unit in self.units for pack in unit.packs for axis in pack.others}
        group, first = mesh.group("shard", *others), mesh.ranks("shard", *others)[0]
        order = torch.tensor(self._passes.seen())
        repeats = torch.tensor([unit.repeats for unit in self._passes.units], dtype=torch.int64)
        both = torch.cat([order, repeats]).to(device)
        if mesh.degree("shard", *others) > 1:
            dist.broadcast(both[:count], src=first, group=group)
            dist.all_reduce(both[count:], dist.ReduceOp.MAX, group=group)
        self._passes.reorder(both[:count].tolist(), [bool(flag) for flag in both[count:].tolist()])
        self._sums.order = self._sending_order()
        self._learned = True


@dataclass(slots=True, eq=False)
class Call:
    """One pass through `units`, in the order of gathering.

    Attributes:
        next: number of units that have had their turn.
        hold: this is a forward with gradients.
        done: units gathered in this pass; concurrent calls may share them.
        saving: this call has activated the hooks on what autograd saves.
    """

    units: list[Unit]
    hold: bool
    done: set[Unit] = field(default_factory=set)
    next: int = 0
    depth: int = 0
    saving: bool = False


@dataclass(slots=True, eq=False)
class _SavedWeight:
    """What autograd saves of a gathered parameter: the tensor, whose memory is there while its unit is whole."""

    tensor: torch.Tensor
    unit: Unit
    call: Call
    version: int


class Gathering:
    """How this rank gets whole units: it reads the segments of ranks of its host, or all ranks take part in a gather.

    Attributes:
        one_sided: the others' segments lie in shared memory, where this rank reads them without the others' help.
        sent_nbytes: bytes that this rank has sent.
        shard_group: the ranks.
        version: counts the steps, after each of which the parameters change.
    """

    def __init__(self, units: list[Unit], arrived: Callable[[Sharded], None]) -> None:
        self.shard_group, self.sent_nbytes, self.version = ShardGroup(None, untracked_channel()), 0, 0
        self._packs = [pack for unit in units for pack in unit.packs]
        self._arrived = arrived
        self._segments: SharedSegments | None = None
        self._storages: dict[int, Unit] = {}

    def meet(self, shard_group: ShardGroup) -> None:
        """Gather among these ranks."""
        self.shard_group = shard_group
        if self._packs and isinstance(shard_group.communicator, SharedMemoryCommunicator):
            self._segments = SharedSegments(shard_group.communicator)

    @property
    def one_sided(self) -> bool:
        return self._segments is not None

    def start(self, unit: Unit) -> None:
        """Start to gather a unit. Collective, unless gathering is one-sided; then nothing needs to be started."""
        if self._segments is None:
            self.sent_nbytes += unit.launch(self.shard_group)

    def finish(self, unit: Unit) -> None:
        """Put the whole parameters of a unit into the modules; `start` has been called."""
        if unit.whole:
            return
        if self._segments is not None:
            self._open(self._segments)
            self.sent_nbytes += unit.read(self._segments, self.shard_group)
        else:
            unit.fill()
        unit.filled(self._arrived)
        for pack in unit.packs:
            self._storages[pack.storage] = unit

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit of a whole parameter, or of a view of one; None for any other tensor."""
        try:
            return self._storages.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without a storage: sparse ones, or those of functorch
            return None

    def settle(self) -> None:
        """Wait until no rank reads this rank's segments, so that they may change. Collective."""
        if self._segments is None:
            self.shard_group.settle()
            for pack in self._packs:
                if isinstance(pack, OffloadedPack):
                    pack.synchronize()
        else:
            self._open(self._segments)
            self._segments.close()

    def _open(self, segments: SharedSegments) -> None:
        """Let other ranks read this rank's segments, which are moved to shared memory first."""
        if not segments.laid:
            flats = segments.lay([pack.flat for pack in self._packs])
            for index, (pack, flat) in enumerate(zip(self._packs, flats, strict=True)):
                pack.index = index
                pack.move(flat)
        segments.open()


class GatherHooks(WeightKeeper):
    """Hooks on a model's modules that gather units while they compute.

    `units[0]` holds the parameters outside of blocks; it stays gathered from forward to the end of backward. With
    `keep` (level 2) so do all others. Otherwise (level 3) each unit is freed after its block's forward. In backward, a
    unit is gathered when backward reaches its block's output, or else when autograd asks for one of its saved weights.
    `complete` is called with every unit whose gradients one backward has computed, `ended` when one has ended, and
    `opening` when a pass begins outside of a step.

    Ranks of one host read each other's segments (`SharedSegments`) and need not gather the same units. Elsewhere all
    ranks take part in every gather: each pass through a module gathers all units under it, in one order on all ranks.
    """

    def __init__(self, model: nn.Module, units: list[Unit], blocks: Mapping[nn.Module, Unit], *, keep: bool):
        self.units, self.keep = units, keep
        self.gathering = Gathering(units, self._arrived)
        self.complete: Callable[[Unit], None] | None = None
        self.ended: Callable[[], None] | None = None
        self.opening: Callable[[], None] | None = None
        self.in_step = False
        self._seen: dict[Unit, None] = {}
        self._call: Call | None = None
        self._last_call: dict[Unit, Call] = {}
        self._backward: dict[Call, Call] | None = None
        self._reentrant = False
        self._saved_hooks = SavedTensorHooks(self._pack, self._unpack)
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        self._under = _under(model, units, blocks)
        self._blocks = blocks
        for module in self._under:
            module.register_forward_pre_hook(uncompiled(self._enter), prepend=True)
            module.register_forward_hook(uncompiled(self._leave), always_call=True)
        stray = uncompiled(self.stray)
        for block, unit in blocks.items():
            for name, inner in block.named_modules():
                if name and any(True for _ in inner.parameters(recurse=False)):
                    guard = _Guard(f"{unit.name}.{name}", unit, stray)
                    inner.register_forward_pre_hook(guard, prepend=True)

    def begin_step(self) -> None:
        """A step begins: free what earlier passes have left. Shards do not change until the step's end."""
        self.in_step, self._backward = True, None
        self._saved_hooks.clear()
        self._saved_hooks.push_for_step()
        self._last_call.clear()
        self.release()
        for unit in self.units:
            unit.calls = 0

    def end_step(self) -> None:
        """All gradients are reduced: wait for slower ranks, which may still read what the update will change."""
        self.in_step = False
        self._saved_hooks.clear()
        self.gathering.settle()
        self.gathering.version += 1

    def release(self) -> None:
        """Free all gathered parameters, because the shards are about to change."""
        for unit in self.units:
            if unit.whole or unit.launched:
                unit.drop("shard")

    def seen(self) -> list[int]:
        """The units' positions in the order in which this rank has run them; units that have not run come last."""
        run = [self.units.index(unit) for unit in self._seen]
        return list(dict.fromkeys([0, *run, *range(len(self.units))]))

    def reorder(self, order: list[int], repeats: list[bool]) -> None:
        """Gather in this order from the next pass on; `repeats`: units that run several times in one pass."""
        for unit, repeated in zip(self.units, repeats, strict=True):
            unit.repeats = repeated
        place = {self.units[position]: rank for rank, position in reversed(list(enumerate(order)))}
        self.units.sort(key=place.__getitem__)
        for under in self._under.values():
            under.sort(key=place.__getitem__)

    def stray(self, unit: Unit) -> bool:
        """Gather a unit for a module that was called without its block; returns whether that is possible.

        It is where the unit can be freed later: at the end of the pass, of backward or of the step.
        """
        if not self.in_step and self._call is None:
            return False
        call = self._call or self._last_call.setdefault(unit, Call(self.units, hold=torch.is_grad_enabled()))
        self._need(call, unit)
        unit.held = self._call is None
        return True

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._call is None:
            if not self.in_step and self.opening is not None and not in_backward():
                self.opening()
            self._call = Call(self._under[module], hold=torch.is_grad_enabled())
            for unit in self._call.units:
                if not unit.whole:
                    unit.show("absent")
            self._call.saving = self._saved_hooks.push()
            if in_backward() and self._call.hold and self._saved_hooks.innermost():
                self._reentrant = True
        self._call.depth += 1
        for unit in _direct(self._under[module], self._blocks.get(module), self.units[0]):
            unit.entered += 1
            unit.calls += not in_backward()
            self._seen.setdefault(unit)
            self._last_call[unit] = self._call
            self._need(self._call, unit)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        assert call is not None
        call.depth -= 1
        for unit in _direct(self._under[module], self._blocks.get(module), self.units[0]):
            unit.entered -= 1
            if torch.is_grad_enabled() and (module in self._blocks or not call.depth):
                self._watch(call, unit, output)
                unit.held = unit.held or in_backward()  # recomputed for the backward that comes now
            stays = unit.held or unit.repeats or (call.hold and (self.keep or unit is self.units[0]))
            if not unit.entered and not stays:
                unit.drop("absent")
                torch.clear_autocast_cache()  # it would keep the whole weights in lower precision
        if not call.depth:
            self._call = None
            if call.saving:
                self._saved_hooks.pop()
            self._close(call, failed=output is None)

    def _need(self, call: Call, unit: Unit) -> None:
        """Give every unit of the call up to this one its turn, wait for this one, and start the next."""
        with torch.inference_mode(False):  # tensors made in that mode could not be trained later
            again = unit in call.done and not unit.whole and not unit.launched
            if self.gathering.one_sided:
                call.done.add(unit)
            else:
                self._advance(call, call.units.index(unit) + 1)
            if again:
                unit.repeats = unit.repeats or call is self._call
                self.gathering.start(unit)
            self.gathering.finish(unit)
            if not self.gathering.one_sided:
                self._advance(call, call.next + 1)

    def _advance(self, call: Call, stop: int) -> None:
        """Gather the units whose turn it is, each once a pass. Whether a unit is gathered already is the same on all
        ranks.
        """
        for unit in call.units[call.next : stop]:
            if unit not in call.done:
                call.done.add(unit)
                self.gathering.start(unit)
        call.next = max(call.next, min(stop, len(call.units)))

    def _close(self, call: Call, *, failed: bool) -> None:
        """The outermost module has returned: take part in the rest of the pass, free units, and note which stay."""
        if not failed:
            self._advance(call, len(call.units))
        hold = call.hold and not failed and (self.in_step or not self.gathering.one_sided)
        for unit in call.units:
            if unit.held:
                continue
            if hold and (self.keep or unit is self.units[0]) and (unit.whole or unit.launched):
                self.gathering.finish(unit)
                unit.held = True
            else:
                unit.drop("shard")
        if not hold and not self.in_step and not in_backward():
            self.gathering.settle()  # parameters may change before the next pass, when a checkpoint is loaded

    def _watch(self, call: Call, unit: Unit, output: Any) -> None:
        """Let backward gather the unit before it enters the module through `output`."""
        for tensor in _tensors(output, 0):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before, call, unit))  # type: ignore[no-untyped-call]

    def _before(self, call: Call, unit: Unit, gradient: torch.Tensor | None = None) -> None:
        """Backward has reached a module's output, or needs a weight that was saved in this call."""
        self._open_backward()
        assert self._backward is not None
        if call not in self._backward:
            first = [other for other in call.units if other is self.units[0]]
            rest = [other for other in call.units[::-1] if other is not self.units[0]]
            done = next((hooks.done for hooks in self._backward.values()), set())
            self._backward[call] = Call([*first, *rest], hold=True, done=done)
        for other in self.units:
            if other.spent and other is not unit and not other.entered:
                other.drop(self._rest)
        self._need(self._backward[call], unit)
        unit.held, unit.spent = True, unit.missing == 0

    def _open_backward(self) -> None:
        if self._backward is None:
            self._backward = {}
            Variable._execution_engine.queue_callback(self._end_backward)
            for unit in self.units:
                unit.expect(self._arrived)

    def _arrived(self, parameter: Sharded) -> None:
        """The gradient of one parameter is complete, so backward has finished with that parameter."""
        self._open_backward()
        if parameter.arrived:
            return
        parameter.arrived = True
        unit = self._unit_of[parameter]
        unit.missing -= 1
        if unit.missing == 0:
            later = self._reentrant and (
                unit.calls > 1 or unit is self.units[0]
            )  # in a further backward inside this one
            if unit.entered or ((unit.frozen or later) and unit.whole):
                unit.spent = True
            elif not self.keep or self.complete is not None:
                unit.drop(self._rest)
            if self.complete is not None and not later:
                self.complete(unit)

    def _end_backward(self) -> None:
        """Backward has ended: take part in the rest of it, and free units.

        Parameters outside of blocks stay: this may have been a backward inside of the loss, and another comes.
        """
        assert self._backward is not None
        for call in self._backward.values():
            self._advance(call, len(call.units))
        for unit in self.units:
            if self.keep and self.complete is None:
                if unit.launched:
                    self.gathering.finish(unit)
                unit.held = unit.whole
            elif (unit.whole or unit.launched) and not unit.entered and not (unit is self.units[0] and unit.held):
                unit.drop(self._rest)
        self._backward = None
        if self.ended is not None and self.complete is not None:
            self.ended()
        if not self.in_step and self._call is None:
            self.release()
            self.gathering.settle()

    @property
    def _rest(self) -> Literal["shard", "absent"]:
        """What modules hold while their unit is not gathered: within a pass, tensors that cannot be computed with."""
        return "shard" if self._call is None else "absent"

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor: note the unit of a gathered parameter, which backward may have to gather again."""
        unit = self.gathering.unit_of(tensor)
        if unit is None:
            return tensor
        return _SavedWeight(tensor, unit, self._call or self._last_call[unit], self.gathering.version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedWeight):
            return saved  # type: ignore[no-any-return]
        unit = saved.unit
        if saved.version != self.gathering.version and any(parameter.trained for parameter in unit.parameters):
            raise ScriptError(
                f"backward reached {unit.name or 'the model'!r} through what an earlier step computed with parameters "
                "that have been updated since; detach what is carried from step to step"
            )
        if not unit.whole:
            self._before(saved.call, unit)
        return saved.tensor


@dataclass(frozen=True, slots=True)
class _Guard:
    """Gathers the unit of a block for a module inside of it that is called without the block, or refuses the call."""

    name: str
    unit: Unit
    gather: Callable[[Unit], bool]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.unit.whole and not self.gather(self.unit):
            raise ScriptError(
                f"module {self.name!r} was called from outside of its block {self.unit.name!r}, whose parameters are "
                "divided among ranks; call the block or the model, or use sharding level 1"
            )


def _direct(under: list[Unit], own: Unit | None, outside: Unit) -> list[Unit]:
    """The units under a module whose parameters it may use itself: those of its block and those outside of blocks."""
    return [unit for unit in under if unit is own or unit is outside]


def _under(model: nn.Module, units: list[Unit], blocks: Mapping[nn.Module, Unit]) -> dict[nn.Module, list[Unit]]:
    """Blocks and modules outside of blocks, each with the units whose parameters are under it."""
    inside = {inner for block in blocks for inner in block.modules() if inner is not block}
    owners = {unit: {module for parameter in unit.parameters for module, _ in parameter.places} for unit in units}
    under = {}
    for module in model.modules():
        if module not in inside:
            below = set(module.modules())
            under[module] = [unit for unit in units if owners[unit] & below]
    return under


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """All tensors in a module's return value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 8 or value is None or isinstance(value, str | int | float | bool):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name), depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth + 1)


def _meet(handle: Any, channel: CommChannel, offloaded: Sequence[Pack]) -> ShardGroup:
    """The ranks of a process group. What a device computes with, if it is not the host, is in no shared memory."""
    return ShardGroup(handle, channel) if offloaded else ShardGroup.meet(handle, channel)


def _move_rest(model: nn.Module, packs: Iterable[Pack], device: torch.device) -> None:
    """Move the parameters that no pack holds to the device."""
    packed = {parameter.shard for pack in packs for parameter in pack.parameters}
    for parameter in model.parameters():
        if parameter not in packed and not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def shard(model: nn.Module, plan: Plan, layout: Layout, device: torch.device | None = None) -> Shards:
    """Shard what the plan says among the ranks of the `shard` axis; call it after all other mechanisms.

    Args:
        model: the model, changed in place.
        plan: the plan.
        layout: gets the shard of every parameter.
        device: where this rank computes, if the plan keeps something on the host.
    """
    sharding = plan.sharding
    if layout.mesh.degree("shard") > 1 and sharding.level == 1:
        return States(model, layout, sharding)
    if layout.mesh.degree("shard") > 1 and sharding.engine == "fsdp2":
        from tutti.parallel.sharding.fsdp2 import FullyShard  # its import takes long, and few plans need it

        return FullyShard(model, layout, plan)
    offload = HostState.of(plan, device or torch.device("cpu"))
    if layout.mesh.degree("shard") == 1 and offload is None:
        return Shards()
    return Parameters(model, layout, sharding, offload)
