"""What `scanfield check` compares of the layers: result, one step, all gradients, relevance, on the same parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy

import scanfield
from scanfield.cli import agree_pinn, draws
from scanfield.cli.places import Place
from scanfield.layers import (
    Activated,
    CausalConv1d,
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    GatedMLP,
    LanguageModel,
    Layer,
    Linear,
    Mamba2Block,
    MambaBlock,
    Residual,
    RMSNorm,
    SelectiveSSM,
    Sequential,
)

SUBJECT = agree_pinn.Subject("layers")

Verb = Callable[[Layer, Any, Any, Place], dict[str, Any]]
"""``verb(layer, x, state, place)``: results by name."""

_WIDTH, _TIME, _BATCH, _VOCABULARY = 4, 6, 2, 7


def _gated(config: GatedDeltaNet2Config) -> Layer:
    return GatedDeltaNet2(_WIDTH, config)


_QUICK: dict[str, Callable[[], Layer]] = {
    "MambaBlock": lambda: MambaBlock(_WIDTH, 3, dt_rank=2, bias=True),
    "Mamba2Block": lambda: Mamba2Block(_WIDTH, 3, head_dim=2, groups=2, dt_limit=(0.05, 1.5)),
    "GatedDeltaNet2": lambda: _gated(GatedDeltaNet2Config(2, 3, value_heads=4, value_width=5)),
}
_FULL: dict[str, Callable[[], Layer]] = {
    **_QUICK,
    "SelectiveSSM": lambda: SelectiveSSM(_WIDTH, 3),
    "MambaBlock, norms inside": lambda: MambaBlock(_WIDTH, 3, dt_rank=2, dt_bc_norm="weighted"),
    "Mamba2Block, norm first": lambda: Mamba2Block(_WIDTH, 3, head_dim=4, norm_before_gate=True),
    "KDA": lambda: _gated(GatedDeltaNet2Config.kda(2, 3, decay_lower_bound=-4.0)),
    "Gated DeltaNet": lambda: _gated(GatedDeltaNet2Config.gated_delta_net(2, 3, value_heads=4)),
    "one operation each": lambda: Residual(
        Sequential(
            RMSNorm(_WIDTH, groups=2),
            CausalConv1d(_WIDTH, 3),
            *map(Activated, ("silu", "gelu", "gelu_tanh", "softplus", "sigmoid")),
            Linear(_WIDTH, _WIDTH),
        )
    ),
    "LanguageModel": lambda: LanguageModel(
        _VOCABULARY, _WIDTH, [MambaBlock(_WIDTH, 2, dt_rank=3, dt_bc_norm="plain")]
    ),
    "LanguageModel, untied": lambda: LanguageModel(
        _VOCABULARY, _WIDTH, [SelectiveSSM(_WIDTH, 2)], mlps=[GatedMLP(_WIDTH, 3)], tied=False
    ),
}
_PARAMETER, _STATE = "parameter ", "state "


def cases(*, full: bool) -> list[draws.Case]:
    """A layer of each kind, moved away from the ones and zeros at which parameters start."""
    return [_case(kind) for kind in (_FULL if full else _QUICK)]


def _case(kind: str) -> draws.Case:
    rng = numpy.random.default_rng(zlib.crc32(kind.encode()))
    layer = _FULL[kind]().init(0)
    arrays = {
        _PARAMETER + name: array + 0.3 * rng.standard_normal(array.shape)
        for name, array in layer.named_parameters().items()
    }
    if layer.tokens:
        arrays["x"] = rng.integers(0, _VOCABULARY, (_BATCH, _TIME)).astype("float64")
    else:
        arrays["x"] = rng.standard_normal((_BATCH, _TIME, _WIDTH))
    _, state = layer(_whole(layer, arrays["x"], numpy.asarray))
    arrays |= {_STATE + name: rng.standard_normal(array.shape) for name, array in state.items()}
    return draws.Case(draws.Regime(kind), arrays, {"kind": kind}, {"x": arrays["x"][:, 0]})


def candidates(place: Place, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The generic forms, and what this place would take by itself for the scan inside."""
    one = place.array(numpy.ones((1, 1, 1, 1), dtype=numpy.float32))
    taken = scanfield.explain(scanfield.gdn2, one, one, one, -one).taken["forward"]
    return ["generic"] if taken.startswith("generic") else ["generic", taken]


def _whole(layer: Layer, x: Any, array: Any) -> Any:
    """x, or the tokens that it stands for: the arrays of a case are floats."""
    return array(numpy.asarray(x).astype("int32")) if layer.tokens else x


def _under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _weights(like: Any, seed: int, place: Place) -> Any:
    """A cotangent for a result."""
    dtype = str(like.dtype).rpartition(".")[2]
    # Rounded to float32, so that both dtypes have the same inputs.
    drawn = numpy.random.default_rng(seed).standard_normal(tuple(like.shape)).astype("float32")
    return place.array(drawn.astype(dtype))


def _run(verb: Verb, x: Any, arrays: Any, options: Any, place: Place) -> dict[str, Any]:
    """The verb of the layer of a case, on a place's arrays: one program where the library compiles."""
    make = _FULL[options["kind"]]
    if make().tokens:
        x = _whole(make(), place.numpy(x), place.array)

    def run(x: Any, parameters: Any, state: Any) -> dict[str, Any]:
        return verb(make().replaced(parameters), x, state, place)

    found: dict[str, Any] = place.compiled(run)(x, _under(_PARAMETER, arrays), _under(_STATE, arrays))
    return found


def _vjp(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    return _run(_vjp_of, arrays["x"], arrays, options, place)


def _vjp_of(layer: Layer, x: Any, state: Any, place: Place) -> dict[str, Any]:
    (output, after), pullback = layer.vjp(x, state)
    d_after = {name: _weights(array, i + 1, place) for i, (name, array) in enumerate(after.items())}
    d_x, d_state, gradients = pullback(_weights(output, 0, place), d_after)
    found = {"output": output} | {f"state {name}": array for name, array in after.items()}
    found |= {f"d_{name}": array for name, array in gradients.items()} | ({} if d_x is None else {"d_x": d_x})
    return found | {f"d_state {name}": array for name, array in (d_state or {}).items()}


def _step(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    return _run(_step_of, token["x"], arrays, options, place)


def _step_of(layer: Layer, x: Any, state: Any, place: Place) -> dict[str, Any]:
    output, after = layer.step(x, state)
    return {"step's output": output} | {f"step's {name}": array for name, array in after.items()}


def _relevance(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    return _run(_relevance_of, arrays["x"], arrays, options, place)


def _relevance_of(layer: Layer, x: Any, state: Any, place: Place) -> dict[str, Any]:
    R = _weights(layer(x, state).output, 3, place)
    # At 1 no small output, which every implementation rounds its own way, is divided by.
    found = layer.relevance(R, x, state, epsilon=1.0)
    return {"relevance": found.x} | {f"relevance of {name}": array for name, array in found.state.items()}


VERBS = {"result and gradients": _vjp, "token": _step, "relevance of a layer": _relevance}
