"""LSTM, GRU and RNN over the split axis: every rank computes the gates of its hidden units, and after each step the
ranks exchange the units' values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from tutti.errors import ScriptError
from tutti.parallel.tensor.exchange import copy, gather, gather_copy, take
from tutti.parallel.tensor.linear import Entry
from tutti.parallel.tensor.parted import whole
from tutti.parallel.tensor.spread import Spread

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
"""Gates of each kind of cell: rows of a weight per hidden unit."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecurrentForward:
    """The forward of one nn.LSTM, nn.GRU or nn.RNN. `units`: the spread of its hidden units, the same in all layers.

    Input-to-hidden products of all steps are computed at once; each step then needs one exchange of the hidden state.
    """

    module: nn.RNNBase
    entry: Entry
    units: Spread

    def __call__(self, input: Any, hx: Any = None) -> tuple[torch.Tensor, Any]:
        module, group = self.module, self.entry.group
        if isinstance(input, PackedSequence):
            raise ScriptError(
                f"a {module.mode} that is divided over the split axis got a packed sequence; give it padded sequences, "
                "or keep it whole: LayoutRule(modules=..., placement='replicate')"
            )
        x, batched = whole(input), input.dim() == 3
        x = x.unsqueeze(1) if not batched else x.transpose(0, 1) if module.batch_first else x  # (time, batch, features)
        directions = 2 if module.bidirectional else 1
        states = self._initial(hx, x, directions * module.num_layers, batched)
        finals: list[tuple[torch.Tensor, ...]] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                out, last = self._run(x, [s[number] for s in states], layer, direction)
                outputs.append(out)
                finals.append(last)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if module.dropout > 0 and layer < module.num_layers - 1:
                x = F.dropout(x, module.dropout, module.training)
        stacked = [gather(torch.stack(column), 2, self.units, group) for column in zip(*finals, strict=True)]
        if not batched:
            x, stacked = x.squeeze(1), [s.squeeze(1) for s in stacked]
        elif module.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(stacked) if module.mode == "LSTM" else stacked[0]

    def _initial(self, hx: Any, x: torch.Tensor, count: int, batched: bool) -> list[torch.Tensor]:
        """Initial h (and c), whole: (layers x directions, batch, hidden) each."""
        kinds = 2 if self.module.mode == "LSTM" else 1
        if hx is None:
            return [x.new_zeros(count, x.shape[1], self.module.hidden_size)] * kinds
        given = [whole(one) for one in (hx if isinstance(hx, tuple | list) else (hx,))]
        return given if batched else [one.unsqueeze(1) for one in given]

    def _run(
        self, x: torch.Tensor, initial: list[torch.Tensor], layer: int, direction: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """One layer in one direction: all outputs, whole, and this rank's part of the last state."""
        own, group = self.module._parameters, self.entry.group
        suffix = f"l{layer}" + ("_reverse" if direction else "")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_ih, w_hh, b_ih, b_hh = (own.get(f"{name}_{suffix}") for name in names)
        assert w_ih is not None
        assert w_hh is not None
        inputs = F.linear(self.entry(x), w_ih, b_ih)
        state = tuple(take(one, 1, self.units, group) for one in initial)
        full = copy(initial[0], group)
        steps = range(x.shape[0])
        outputs: list[torch.Tensor] = []
        for t in reversed(steps) if direction else steps:
            state = _cell(self.module.mode, inputs[t], F.linear(full, w_hh, b_hh), state)
            outputs.append(state[0])
            full = gather_copy(state[0], 1, self.units, group)
        stacked = torch.stack(outputs[::-1] if direction else outputs)
        return gather(stacked, 2, self.units, group), state


def _cell(mode: str, x: torch.Tensor, h: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One step of this rank's units from the gates' two products, by torch's definitions."""
    if mode == "LSTM":
        i, f, g, o = (x + h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        z = (xz + hz).sigmoid()
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((x + h).tanh() if mode == "RNN_TANH" else (x + h).relu(),)


def recurrent_parameters(module: nn.RNNBase) -> list[str]:
    """Names of the parameters, all of which are cut by gates along dim 0."""
    return [name for name in module._parameters if module._parameters[name] is not None]
