"""A model under fully_shard (FSDP2): its units, and which tensors its modules hold.

Between steps the modules hold this rank's parts as plain parameters, which share memory with FSDP2's DTensors, as under
tutti's own sharding. While a pass runs they hold the DTensors, which FSDP2 replaces by the whole parameters of the
units that compute. FSDP2's classes of modules are taken off again; its hooks do all the work.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tutti.comm.devices import current_device
from tutti.config.plan import Plan
from tutti.errors import ScriptError
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh, coordinates_of
from tutti.parallel.sharding.fsdp2_comm import CheckedAllGather, CheckedReduceScatter, RankAgreement
from tutti.parallel.sharding.fsdp2_units import LOW_PRECISION, UnitPlan, plan_units
from tutti.parallel.sharding.saved_weights import in_backward
from tutti.parallel.sharding.sharded_gradients import uncompiled
from tutti.parallel.sharding.sharded_unit import like_parameter


@dataclass(slots=True, eq=False)
class FsdpParameter:
    """One parameter.

    Attributes:
        name: the first of its names in the model.
        of_torch: FSDP2's record of it (FSDPParam).
        part: this rank's part, which modules hold between steps.
        trained: whether it requires a gradient. The script may change that on whichever tensor its modules hold.
        watched: a gradient of the DTensor itself is refused.
    """

    name: str
    of_torch: Any
    part: nn.Parameter
    trained: bool
    watched: bool = False

    @property
    def whole(self) -> nn.Parameter | None:
        """The whole parameter, whose memory may be freed; None before it is first gathered."""
        whole: nn.Parameter | None = getattr(self.of_torch, "_unsharded_param", None)
        return whole

    @property
    def has_gradient(self) -> bool:
        """Whether the whole parameter has a gradient that is not reduced."""
        whole = self.whole
        return whole is not None and (whole.grad is not None or self.of_torch.unsharded_accumulated_grad is not None)

    def drop_gradient(self) -> None:
        """Forget a gradient of the whole parameter."""
        self.of_torch._unsharded_param.grad = self.of_torch.unsharded_accumulated_grad = None

    def show_part(self) -> None:
        """Put the part into the modules."""
        self._follow_script()
        self.of_torch._setattr_on_modules(self.part)

    def show_sharded(self) -> None:
        """Put the DTensor into the modules; backward may not compute a gradient of it, which nobody would reduce."""
        self._follow_script()
        sharded = self.of_torch.sharded_param
        if sharded.requires_grad and not self.watched:
            self.watched = True

            sharded.register_hook(self._refuse)
        self.of_torch._setattr_on_modules(sharded)

    def _refuse(self, gradient: torch.Tensor) -> None:
        raise ScriptError(
            f"the loss uses parameter {self.name!r} outside of its block's forward, where FSDP2 does not reduce its "
            "gradient; use the optimizer's weight decay instead of a penalty, or sharding.engine = tutti"
        )

    def _follow_script(self) -> None:
        """Let all tensors require a gradient if the script has switched that on for one of them; or none."""
        whole = self.whole
        tensors = [self.part, self.of_torch.sharded_param, *([] if whole is None else [whole])]
        if any(tensor.requires_grad is not self.trained for tensor in tensors):
            self.trained = not self.trained
            for tensor in tensors:
                tensor.requires_grad_(self.trained)

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Give a part without memory what `real` returns for it."""
        of_torch, trained = self.of_torch, self.trained
        if not of_torch._sharded_param_data.is_meta:
            return
        flat = real(of_torch._sharded_param_data).to(torch.device("cpu") if of_torch.offload_to_cpu else device)
        flat = flat.pin_memory() if of_torch.pin_memory else flat
        rows = of_torch.sharded_size[0] if of_torch.sharded_size.numel() else 0
        local = flat.view(of_torch.padded_sharded_param_size).narrow(0, 0, rows)
        of_torch._sharded_param_data = flat
        of_torch.sharded_param = nn.Parameter(of_torch.to_sharded_dtensor(local), requires_grad=trained)
        self.part = like_parameter(self.part, local, trainable=trained)


@dataclass(slots=True, eq=False)
class FsdpUnit:
    """What is gathered together: `group` is FSDP2's FSDPParamGroup. The root has no name."""

    name: str
    group: Any
    parameters: list[FsdpParameter] = field(default_factory=list)

    @property
    def version(self) -> int:
        """How often the whole parameters were written in place."""
        wholes = [parameter.whole for parameter in self.parameters]
        return max((whole._version for whole in wholes if whole is not None), default=0)


class FsdpModel:
    """Shards a model by fully_shard over `shard`, and replicates it over `replicate` (HSDP).

    Args:
        model: the model, changed in place.
        layout: gets the shard of every parameter.
        plan: the plan.

    Attributes:
        units: in the order in which fully_shard made them; empty ones are left out.
        parameters: all of the units'.
        unit_of: the unit of each parameter, by name.
        agreement: checks that ranks are at the same place.
        in_pass: a step or a pass runs, whose end frees what is gathered.
    """

    def __init__(self, model: nn.Module, layout: Layout, plan: Plan) -> None:
        self._layout, self._plan = layout, plan
        self.in_pass = False
        self.agreement = RankAgreement(layout, self._describe)
        self.units: list[FsdpUnit] = []
        self._memory: dict[int, FsdpUnit] = {}
        self._root = self._wrap(model)
        self.parameters = [parameter for unit in self.units for parameter in unit.parameters]
        self.unit_of = {parameter.name: unit for unit in self.units for parameter in unit.parameters}
        self.show_parts()

    @property
    def device(self) -> torch.device:
        """Where the whole parameters are."""
        group = self.units[0].group if self.units else None
        return torch.device("cpu") if group is None else group.device

    def watch(self, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        """Call `enter` before FSDP2 acts in a unit's forward, and `leave` after it, also where forward fails."""
        for module in self._modules:
            module.register_forward_pre_hook(uncompiled(enter), prepend=True)
            module.register_forward_hook(uncompiled(leave), always_call=True)

    def initialise(self) -> None:
        """All units are made and have memory: let FSDP2 find its root."""
        for parameter in self.parameters:
            parameter.of_torch._setattr_on_modules(parameter.of_torch.sharded_param)
        self._root._lazy_init()
        self.show_parts()

    def gather(self, unit: FsdpUnit) -> None:
        """Gather a unit outside of its module's forward. The end of backward, or of the step, frees it."""
        group = unit.group
        if group.is_unsharded:
            return
        if not in_backward():
            self.show_sharded()
        group.unshard()
        group.wait_for_unshard()
        if in_backward():  # gradients may come after those that were reduced; what comes is reduced at the end
            group._training_state = TrainingState.PRE_BACKWARD
            self._root._register_root_post_backward_final_callback()

    def unit_of_memory(self, tensor: torch.Tensor) -> FsdpUnit | None:
        """The unit of a whole parameter, or of a view of one; None for any other tensor."""
        try:
            return self._memory.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without a storage: sparse ones, or those of functorch
            return None

    def reset(self) -> None:
        """Free what is gathered, forget a pass that was not finished, and let modules hold the parts."""
        if self._root._is_root is not None:
            self._root._reset_iter_state()
        self.show_parts()

    def show_parts(self) -> None:
        for parameter in self.parameters:
            parameter.show_part()

    def show_sharded(self) -> None:
        for unit in self.units:
            for parameter in unit.parameters if unit.group.is_sharded else ():
                parameter.show_sharded()

    def _describe(self, place: int) -> str:
        unit, reduces = divmod(place, 2)
        if unit >= len(self.units):
            return "the end of the step"
        return f"{'the gradients of ' if reduces else ''}{self.units[unit].name or 'the model itself'!r}"

    def _wrap(self, model: nn.Module) -> Any:
        """Call fully_shard on every unit; return the state of the root."""
        # The hooks on what autograd saves gather a unit whose output, a view, was changed in place (fsdp2_saved).
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        classes = {module: type(module) for module in model.modules()}
        first = next(model.parameters())
        # A model without memory does not say where it will be. Gloo exchanges between CPUs, whatever a host has.
        unknown = "cpu" if dist.get_backend() == "gloo" else current_device().type
        kind = unknown if first.is_meta else first.device.type
        mesh, offload = _device_mesh(self._layout.mesh, kind), _offloading(self._plan, kind)
        planned_units = plan_units(model, self._layout, self._plan.precision)
        for planned in planned_units:
            given = {name: getattr(*places[0]) for name, places in planned.members.items()}
            held = set(given.values())
            wrapped = fully_shard(
                planned.module,
                mesh=mesh,
                reshard_after_forward=bool(planned.name) and self._plan.sharding.level == 3,
                mp_policy=_policy(self._plan, planned),
                offload_policy=offload,
                ignored_params={p for p in planned.module.parameters() if p not in held},
            )
            for group in fully_shard.state(planned.module)._fsdp_param_groups:  # type: ignore[attr-defined]
                self._adopt(planned, wrapped, group, given)
        for module, own in classes.items():
            module.__class__ = own
        self._modules = [planned.module for planned in planned_units]
        return fully_shard.state(model)  # type: ignore[attr-defined]

    def _adopt(self, planned: UnitPlan, wrapped: Any, group: Any, given: dict[str, nn.Parameter]) -> None:
        """Note a unit that fully_shard has just made, and how its gradients are reduced."""
        unit, number = FsdpUnit(name=planned.name, group=group), 2 * len(self.units)
        wrapped.set_gradient_divide_factor(1.0)  # losses are weighted, so gradients are summed
        wrapped.set_force_sum_reduction_for_comms(True)
        wrapped.set_reduce_scatter_unused_params(True, recurse=False)
        wrapped.set_custom_all_gather(CheckedAllGather(self.agreement, self._layout, number))
        wrapped.set_custom_reduce_scatter(CheckedReduceScatter(self.agreement, self._layout, number + 1))
        names = {place: name for name, places in planned.members.items() for place in places}
        for of_torch in group.fsdp_params:
            name = names[of_torch._module_info.module, of_torch._module_info.param_name]
            of_torch._post_load_hook_handle.remove()  # it expects modules to hold DTensors
            local, old = of_torch.sharded_param._local_tensor, given[name]
            part = like_parameter(old, local, trainable=old.requires_grad)
            unit.parameters.append(FsdpParameter(name, of_torch, part, trained=old.requires_grad))
            self._note(name, old.shape, local.shape)
        for module in {module for places in planned.members.values() for module, _ in places} - {planned.module}:
            module.register_forward_pre_hook(uncompiled(partial(self._stray, unit)))
        group.wait_for_unshard = partial(self._gathered, unit, group.wait_for_unshard)
        self.units.append(unit)

    def _gathered(self, unit: FsdpUnit, wait: Callable[[], None]) -> None:
        """Wait until a unit is gathered; its memory is known from then on."""
        wait()
        for parameter in unit.parameters if unit not in self._memory.values() else ():
            if parameter.whole is not None:
                self._memory[parameter.whole.untyped_storage()._cdata] = unit

    def _stray(self, unit: FsdpUnit, module: nn.Module, args: Any) -> None:
        """A module of a unit is called: if it was not called by its unit, the unit must be gathered for it."""
        if unit.group.is_unsharded:
            return
        if not self.in_pass:
            raise ScriptError(
                f"{type(module).__name__} was called from outside of its block {unit.name or 'the model'!r}, whose "
                "parameters are divided among ranks; call the block or the model, or use sharding level 1"
            )
        self.gather(unit)

    def _note(self, name: str, whole: torch.Size, local: torch.Size) -> None:
        """Write this rank's rows into the layout."""
        mesh = self._layout.mesh
        start = min(mesh.index("shard") * -(-whole[0] // mesh.degree("shard")), whole[0])
        self._layout.cut(name, 0, *([(start, start + local[0])] if local.numel() else []))
        self._layout.set_reduce_axes(name, ())


def _device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """The ranks for torch: (shard,), or (replicate, shard) for hybrid sharding. The groups are opened here."""
    if mesh.degree("replicate") == 1:
        return DeviceMesh.from_group(mesh.new_group("shard"), kind, mesh_dim_names=("shard",))
    ranks = torch.empty(mesh.degree("replicate"), mesh.degree("shard"), dtype=torch.int)
    for rank in range(mesh.world_size):
        at = coordinates_of(mesh.degrees, rank)
        ranks[at["replicate"], at["shard"]] = rank
    groups = [mesh.new_group("replicate"), mesh.new_group("shard")]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _offloading(plan: Plan, kind: str) -> OffloadPolicy:
    """Parts in host memory, pinned where there is a device to copy them to."""
    return OffloadPolicy() if plan.sharding.offload == "none" else CPUOffloadPolicy(pin_memory=kind != "cpu")


def _policy(plan: Plan, planned: UnitPlan) -> MixedPrecisionPolicy:
    """Gather layers that autocast casts anyway in its dtype; gradients are reduced in the parameters' own."""
    if not planned.lowered:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    module, key = next(iter(planned.members.values()))[0]
    own = getattr(module, key).dtype
    return MixedPrecisionPolicy(param_dtype=LOW_PRECISION[plan.precision], reduce_dtype=own, cast_forward_inputs=False)
