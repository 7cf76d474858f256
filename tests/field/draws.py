"""The three standard draws of the field reports, and the two verdicts their rows use.

Every row of the reports draws its arrays with a seed, in a fixed order and in float64; a row that names a
smaller dtype casts afterwards. `G` draws for the gated delta rule and what derives from it, `M` for the
selective scan, `L` for the linear scan. A row uses of a draw only what it names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import arrays
import numpy as np


def unit(x: np.ndarray) -> np.ndarray:
    """x divided by its Euclidean norm along the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


class Gated(NamedTuple):
    query: np.ndarray  # (batch, time, heads, K)
    key: np.ndarray  # (batch, time, heads, K), of unit norm
    value: np.ndarray  # (batch, time, heads, V)
    log_decay: np.ndarray  # (batch, time, heads, K)
    erase: np.ndarray  # (batch, time, heads, K)
    write: np.ndarray  # (batch, time, heads, V)
    state: np.ndarray  # (batch, heads, K, V)
    d_output: np.ndarray  # (batch, time, heads, V)
    d_state: np.ndarray  # (batch, heads, K, V)
    beta: np.ndarray  # (batch, time, heads)
    head_decay: np.ndarray  # (batch, time, heads): the log decay of a rule with one gate a head

    def inputs(self, operation: str = "gdn2") -> dict[str, np.ndarray]:
        """The sequence arguments that `operation` takes of this draw, by name and in its order."""
        taken: dict[str, dict[str, np.ndarray]] = {
            "gdn2": {"log_decay": self.log_decay, "erase": self.erase, "write": self.write},
            "kda": {"log_decay": self.log_decay, "beta": self.beta},
            "gated_delta_rule": {"log_decay": self.head_decay, "beta": self.beta},
            "delta_rule": {"beta": self.beta},
            "gla": {"log_decay": self.log_decay},
            "retention": {"log_decay": self.head_decay},
            "linear_attention": {},
        }
        return {"query": self.query, "key": self.key, "value": self.value, **taken[operation]}


class Selective(NamedTuple):
    u: np.ndarray  # (batch, time, channels)
    delta: np.ndarray  # (batch, time, channels)
    A: np.ndarray  # (channels, state)
    B: np.ndarray  # (batch, time, state)
    C: np.ndarray  # (batch, time, state)
    D: np.ndarray  # (channels,)
    z: np.ndarray  # (batch, time, channels)
    delta_bias: np.ndarray  # (channels,)
    state: np.ndarray  # (batch, channels, state)
    d_output: np.ndarray  # (batch, time, channels)
    d_state: np.ndarray  # (batch, channels, state)

    def inputs(self, *extra: str) -> dict[str, np.ndarray]:
        """u, delta, A, B and C, and whatever `extra` names."""
        return {name: getattr(self, name) for name in ("u", "delta", "A", "B", "C", *extra)}


class Linear(NamedTuple):
    a: np.ndarray  # (batch, time, channels)
    b: np.ndarray  # (batch, time, channels)
    state: np.ndarray  # (batch, channels)
    d_output: np.ndarray  # (batch, time, channels)
    d_state: np.ndarray  # (batch, channels)

    def inputs(self) -> dict[str, np.ndarray]:
        return {"a": self.a, "b": self.b}


def G(seed: int, batch: int, time: int, heads: int, key: int, value: int) -> Gated:
    r = np.random.default_rng(seed)
    normal, uniform = r.standard_normal, r.uniform
    keys, values = (batch, time, heads, key), (batch, time, heads, value)
    state = (batch, heads, key, value)
    return Gated(
        query=normal(keys),
        key=unit(normal(keys)),
        value=normal(values),
        log_decay=uniform(-1, -0.05, keys),
        erase=uniform(0, 1, keys),
        write=uniform(0, 1, values),
        state=normal(state),
        d_output=normal(values),
        d_state=normal(state),
        beta=uniform(0, 1, (batch, time, heads)),
        head_decay=uniform(-1, -0.05, (batch, time, heads)),
    )


def M(seed: int, batch: int, time: int, channels: int, state: int) -> Selective:
    r = np.random.default_rng(seed)
    normal, uniform = r.standard_normal, r.uniform
    sequence = (batch, time, channels)
    return Selective(
        u=normal(sequence),
        delta=uniform(0.05, 0.5, sequence),
        A=-uniform(0.5, 2, (channels, state)),
        B=normal((batch, time, state)),
        C=normal((batch, time, state)),
        D=normal(channels),
        z=normal(sequence),
        delta_bias=uniform(-0.2, 0.2, channels),
        state=normal((batch, channels, state)),
        d_output=normal(sequence),
        d_state=normal((batch, channels, state)),
    )


def L(seed: int, batch: int, time: int, channels: int) -> Linear:
    r = np.random.default_rng(seed)
    sequence = (batch, time, channels)
    return Linear(
        a=r.uniform(0.5, 1, sequence),
        b=r.standard_normal(sequence),
        state=r.standard_normal((batch, channels)),
        d_output=r.standard_normal(sequence),
        d_state=r.standard_normal((batch, channels)),
    )


def within(got: Any, truth: Any, tolerance: float, what: str = "result") -> None:
    """Assert that the largest difference is at most `tolerance` times the largest value of the truth."""
    worst = arrays.deviation(got, truth)
    assert worst <= tolerance, f"{what} is off by {worst:.3g} of the largest value, allowed {tolerance:.3g}"


def bitwise(got: np.ndarray, truth: np.ndarray, what: str = "result") -> None:
    """Assert that dtype, shape and every bit are the same."""
    assert arrays.same_bits(got, truth), (
        f"{what} is not bit for bit the same: {got.dtype}{got.shape} against {truth.dtype}{truth.shape}, "
        f"deviation {arrays.deviation(got, truth):.3g}"
    )


def printed(got: float, text: str) -> None:
    """Assert that a number is the printed one, to the last digit printed."""
    decimals = len(text.partition(".")[2])
    assert abs(float(got) - float(text)) <= 0.51 * 10.0**-decimals, (
        f"{float(got)!r} where the row prints {text}"
    )
