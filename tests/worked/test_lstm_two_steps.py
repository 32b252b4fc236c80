"""Worked example lstm_two_step: an LSTM unit over two time steps, every intermediate of forward, backward, update.

Three independent ways to the same numbers: the equations written out, autograd over them, and torch.nn.LSTM with
its gates put in its own order. Reference values in float64 to 1e-12;
the published five-digit values to 3e-5 (5e-5 above 1).
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worked.examples import EXAMPLES

EXAMPLE = EXAMPLES["lstm_two_step"]
REFERENCE = EXAMPLE["float64_reference"]
TOLERANCE = EXAMPLE["tolerances"]
GATES = EXAMPLE["gate_order"]  # a: candidate, i: input, f: forget, o: output
TORCH_ORDER = [GATES.index(gate) for gate in ("i", "f", "a", "o")]  # torch.nn.LSTM stacks input, forget, cell, output


def inputs() -> dict[str, Tensor]:
    names = ("W", "U", "b", "x", "y")
    return {name: torch.tensor(EXAMPLE["inputs"][name], dtype=torch.float64) for name in names}


def forward(w: Tensor, u: Tensor, b: Tensor, x: Tensor) -> list[dict[str, Any]]:
    """z = W x + U out + b; a = tanh z_a; i, f, o = sigmoid; state = a i + f state; out = tanh(state) o."""
    out, state = torch.zeros((), dtype=w.dtype), torch.zeros((), dtype=w.dtype)
    steps = []
    for x_t in x:
        z = w @ x_t + u * out + b
        a, (i, f, o) = torch.tanh(z[0]), torch.sigmoid(z[1:])
        new = a * i + f * state
        steps.append({"z": z, "a": a, "i": i, "f": f, "o": o, "state": new, "state_prev": state, "out_prev": out})
        state, out = new, torch.tanh(new) * o
        steps[-1]["out"] = out
    return steps


def backward(w: Tensor, u: Tensor, steps: list[dict[str, Any]], y: Tensor) -> list[dict[str, Any]]:
    """Through time by hand for E = 1/2 sum (out - y)^2; d<gate> is with respect to the gate before its function."""
    zero = torch.zeros((), dtype=w.dtype)
    later = {"Dout_prev": zero, "dstate": zero, "f": zero}  # nothing comes back from after the last step
    found: list[dict[str, Any]] = []
    for step, y_t in zip(reversed(steps), reversed(y), strict=True):
        squashed = torch.tanh(step["state"])
        here: dict[str, Any] = {"Delta": step["out"] - y_t, "Dout_in": later["Dout_prev"]}
        here["dout"] = here["Delta"] + here["Dout_in"]
        here["dstate"] = here["dout"] * step["o"] * (1 - squashed**2) + later["dstate"] * later["f"]
        here["da"] = here["dstate"] * step["i"] * (1 - step["a"] ** 2)
        here["di"] = here["dstate"] * step["a"] * step["i"] * (1 - step["i"])
        here["df"] = here["dstate"] * step["state_prev"] * step["f"] * (1 - step["f"])
        here["do"] = here["dout"] * squashed * step["o"] * (1 - step["o"])
        gates = torch.stack([here[f"d{gate}"] for gate in GATES])
        here |= {"dgates": gates, "dx": w.T @ gates, "Dout_prev": u @ gates}
        found.append(here)
        later = here | {"f": step["f"]}
    return found[::-1]


def gradients(steps: list[dict[str, Any]], back: list[dict[str, Any]], x: Tensor) -> dict[str, Tensor]:
    """Sums over time; U sees the previous output, so the first step adds nothing to its gradient."""
    gates = torch.stack([here["dgates"] for here in back])
    previous = torch.stack([step["out_prev"] for step in steps])
    return {"dW": gates.T @ x, "dU": gates.T @ previous, "db": gates.sum(0)}


@functools.cache
def by_hand() -> dict[str, Any]:
    """Forward, backward, gradients, updated parameters (plain SGD), loss before and after."""
    given, rate = inputs(), EXAMPLE["inputs"]["lr"]
    w, u, b, x, y = (given[name] for name in ("W", "U", "b", "x", "y"))
    steps = forward(w, u, b, x)
    back = backward(w, u, steps, y)
    found = gradients(steps, back, x)
    new = {f"{name}_new": given[name] - rate * found[f"d{name}"] for name in ("W", "U", "b")}
    after = forward(new["W_new"], new["U_new"], new["b_new"], x)
    return {"forward": steps, "backward": back, **found, **new} | {
        "loss_before": error(steps, y),
        "loss_after": error(after, y),
    }


def error(steps: list[dict[str, Any]], y: Tensor) -> Tensor:
    return ((torch.stack([step["out"] for step in steps]) - y) ** 2).sum() / 2


def close(found: Tensor, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_every_intermediate_equals_the_reference(part: str, time: int) -> None:
    expected = REFERENCE[part][time]
    assert len(expected) >= 9
    for name, value in expected.items():
        close(by_hand()[part][time][name], value, TOLERANCE["float64_abs"])


@pytest.mark.parametrize("name", ["dW", "dU", "db", "W_new", "U_new", "b_new", "loss_before", "loss_after"])
def test_gradients_update_and_loss_equal_the_reference(name: str) -> None:
    close(by_hand()[name], REFERENCE[name], TOLERANCE["float64_abs"])


def printed(value: float) -> float:
    """How far a printed value may be off: the chained rounding, or half a unit of its fifth significant digit."""
    fifth = 10.0 ** (math.floor(math.log10(abs(value))) - 4) if value else 0.0
    return max(TOLERANCE["slide_abs"], fifth / 2 * 1.0001)


def test_the_published_digits_agree_as_far_as_they_were_carried() -> None:
    slide, found = EXAMPLE["slide"], by_hand()
    for time in (0, 1):
        for name, value in slide[f"t{time}"].items():
            close(found["forward"][time][name], value, printed(value))
        for name, value in slide[f"bwd_t{time}"].items():
            here = found["backward"][time][{"Dout": "Dout_in"}.get(name, name)]
            close(here, value, TOLERANCE["slide_abs"])
    for name in ("dW", "dU", "db", "W_new", "U_new", "b_new"):
        close(found[name], slide[name], TOLERANCE["slide_abs"])


def test_erratum_the_second_target_is_positive() -> None:
    """The printed label says -1.25; every printed number follows from +1.25."""
    assert EXAMPLE["inputs"]["y1_as_printed"] == -EXAMPLE["inputs"]["y"][1]
    wrong = by_hand()["forward"][1]["out"] - EXAMPLE["inputs"]["y1_as_printed"]
    assert wrong.item() == pytest.approx(2.02198, abs=3e-5)
    assert wrong.item() != pytest.approx(EXAMPLE["slide"]["bwd_t1"]["Delta"], abs=1)


def test_autograd_over_the_equations_agrees_with_the_hand() -> None:
    given = inputs()
    leaves = {name: given[name].requires_grad_() for name in ("W", "U", "b", "x")}
    error(forward(**{name.lower(): leaf for name, leaf in leaves.items()}), given["y"]).backward()
    for name in ("W", "U", "b"):
        assert leaves[name].grad is not None
        close(leaves[name].grad, REFERENCE[f"d{name}"], TOLERANCE["float64_abs"])
    assert leaves["x"].grad is not None
    close(leaves["x"].grad, [step["dx"] for step in REFERENCE["backward"]], TOLERANCE["float64_abs"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, "float64_abs"), (torch.float32, "float32_abs")])
def test_torchs_lstm_takes_the_same_step(dtype: torch.dtype, tolerance: str) -> None:
    given = {name: value.to(dtype) for name, value in inputs().items()}
    lstm = nn.LSTM(input_size=2, hidden_size=1, dtype=dtype)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(given["W"][TORCH_ORDER])
        lstm.weight_hh_l0.copy_(given["U"][TORCH_ORDER, None])
        lstm.bias_ih_l0.copy_(given["b"][TORCH_ORDER])
        lstm.bias_hh_l0.zero_()
    optimizer = torch.optim.SGD([lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0], lr=EXAMPLE["inputs"]["lr"])
    out, (_, state) = lstm(given["x"])
    loss = ((out[:, 0] - given["y"]) ** 2).sum() / 2
    loss.backward()
    optimizer.step()
    allowed = TOLERANCE[tolerance]
    close(out[:, 0], [step["out"] for step in REFERENCE["forward"]], allowed)
    close(state[0, 0], REFERENCE["forward"][1]["state"], allowed)
    close(loss.detach(), REFERENCE["loss_before"], allowed)
    back = [TORCH_ORDER.index(gate) for gate in range(4)]
    for parameter, name in ((lstm.weight_ih_l0, "W"), (lstm.weight_hh_l0, "U"), (lstm.bias_ih_l0, "b")):
        assert parameter.grad is not None
        close(parameter.grad[back].reshape(torch.tensor(REFERENCE[f"d{name}"]).shape), REFERENCE[f"d{name}"], allowed)
        value = parameter.detach()[back]
        close(value.reshape(torch.tensor(REFERENCE[f"{name}_new"]).shape), REFERENCE[f"{name}_new"], allowed)
