"""Small arguments for every operation at once, from one draw of each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from draws import G, L, M


class Example(NamedTuple):
    inputs: dict[str, np.ndarray]  # every array argument, the initial state included
    options: dict[str, Any]
    output: tuple[int, ...]  # shape of the output


def every_operation(
    seed: int, batch: int, time: int, heads: int, key: int, value: int, channels: int, state: int
) -> dict[str, Example]:
    """Operation name -> example. Gated rules get `heads`, `key` and `value`; the others `channels` and `state`."""
    drawn = G(seed, batch, time, heads, key, value)
    examples = {}

    def gated(operation: str, inputs: dict[str, np.ndarray]) -> None:
        examples[operation] = Example(inputs | {"initial_state": drawn.state}, {}, drawn.value.shape)

    for operation in (
        "gdn2",
        "kda",
        "gated_delta_rule",
        "delta_rule",
        "gla",
        "retention",
        "linear_attention",
    ):
        gated(operation, drawn.inputs(operation))
    gated("comba", drawn.inputs("gated_delta_rule") | {"erase_key": drawn.erase})
    two = {  # two sub-steps a token, of which the second reads every vector from its end
        "key": np.stack([drawn.key, drawn.key[..., ::-1]], axis=2),
        "value": np.stack([drawn.value, drawn.value[..., ::-1]], axis=2),
        "beta": np.stack([drawn.beta, 1 - drawn.beta], axis=2),
    }
    gated("gated_delta_product", drawn.inputs("gated_delta_rule") | two)

    dual = {
        "x": drawn.value,
        "dt": drawn.beta,
        "A": -np.linspace(0.5, 1.5, heads),
        "B": drawn.key,
        "C": drawn.query,
        "D": np.linspace(-1, 1, heads),
        "initial_state": np.swapaxes(drawn.state, -1, -2).copy(),
    }
    examples["ssd"] = Example(dual, {}, drawn.value.shape)

    chosen = M(seed, batch, time, channels, state)
    inputs = chosen.inputs("D", "z", "delta_bias") | {"initial_state": chosen.state}
    examples["selective_scan"] = Example(inputs, {"delta_softplus": True}, chosen.u.shape)

    linear = L(seed, batch, time, channels)
    examples["linear_scan"] = Example(linear.inputs() | {"initial_state": linear.state}, {}, linear.b.shape)
    return examples


TIMELESS = frozenset({"A", "D", "delta_bias", "initial_state"})


def token(inputs: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of `step` for token t: sequences without their time axis, the initial state left out."""
    return {
        name: x if name in TIMELESS else x[:, t, ...] for name, x in inputs.items() if name != "initial_state"
    }
