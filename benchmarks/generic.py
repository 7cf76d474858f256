"""The generic forms beside a plain NumPy loop, and the memory that a backward takes as time grows.

NumPy, one thread, float32, median CPU time. The loops below are what one writes by hand: one token after
another, vectorised over batch and heads or channels, forward only. A ratio above 1 means slower than that
loop.

    python benchmarks/generic.py
    python benchmarks/generic.py --json
"""

from __future__ import annotations

import _timing  # first: it sets the number of BLAS threads
import numpy as np

import scanfield


def gdn2_loop(query, key, value, log_decay, erase, write):
    """The recurrence of gdn2, as one writes it by hand."""
    batch, time, heads, K = query.shape
    state = np.zeros((batch, heads, K, value.shape[-1]), query.dtype)
    output = np.empty_like(value)
    scale = K**-0.5
    for t in range(time):
        state = np.exp(log_decay[:, t])[..., None] * state
        read = ((erase[:, t] * key[:, t])[..., None, :] @ state)[..., 0, :]
        state = state + key[:, t][..., None] * (write[:, t] * value[:, t] - read)[..., None, :]
        output[:, t] = scale * (query[:, t][..., None, :] @ state)[..., 0, :]
    return output


def selective_loop(u, delta, A, B, C):
    """The selective scan, as one writes it by hand."""
    batch, time, channels = u.shape
    state = np.zeros((batch, channels, A.shape[1]), u.dtype)
    output = np.empty_like(u)
    for t in range(time):
        step = delta[:, t, :, None]
        state = np.exp(step * A) * state + (step * u[:, t, :, None]) * B[:, t, None, :]
        output[:, t] = (state @ C[:, t, :, None])[..., 0]
    return output


def gdn2_inputs(time, heads, size, rng):
    """Seven float32 arrays but the state, keys of length one."""
    shape = (1, time, heads, size)
    key = rng.standard_normal(shape)
    draws = {
        "query": rng.standard_normal(shape),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal(shape),
        "log_decay": rng.uniform(-1.0, -0.01, shape),
        "erase": rng.uniform(0, 1, shape),
        "write": rng.uniform(0, 1, shape),
    }
    return {name: array.astype(np.float32) for name, array in draws.items()}


def selective_inputs(time, channels, state, rng):
    """The five required float32 arrays."""
    draws = {
        "u": rng.standard_normal((1, time, channels)),
        "delta": rng.uniform(0.01, 0.1, (1, time, channels)),
        "A": -rng.uniform(0.5, 4.0, (channels, state)),
        "B": rng.standard_normal((1, time, state)),
        "C": rng.standard_normal((1, time, state)),
    }
    return {name: array.astype(np.float32) for name, array in draws.items()}


def speed(quick: bool) -> list[dict[str, object]]:
    """Forward, and forward with backward, of each form."""
    rng = np.random.default_rng(0)
    least = 0.05 if quick else 1.0
    found: list[dict[str, object]] = []
    gdn2_sizes = [(64, 2, 16)] if quick else [(1024, 4, 16), (1024, 4, 64), (1024, 4, 128)]
    for time, heads, size in gdn2_sizes:
        arrays = gdn2_inputs(time, heads, size, rng)
        _compare(
            found,
            f"gdn2, 1 x {time} x {heads} heads, K = V = {size}",
            gdn2_loop,
            scanfield.gdn2,
            arrays,
            least,
        )
    selective_sizes = [(64, 16, 4)] if quick else [(1024, 64, 16), (1024, 1024, 16)]
    for time, channels, state in selective_sizes:
        arrays = selective_inputs(time, channels, state, rng)
        table = f"selective_scan, 1 x {time} x {channels} channels, {state} states"
        _compare(found, table, selective_loop, scanfield.selective_scan, arrays, least)
    return found


def _compare(found, table, loop, function, arrays, least):
    plain = _timing.seconds(lambda: loop(**arrays), least=least)
    found.append({"table": table, "form": "plain loop, forward", "ms": 1e3 * plain, "ratio": 1.0})
    told = scanfield.explain(function, **arrays)
    forms = [
        name for name in dict.fromkeys(row.candidate for row in told.verdicts) if name.startswith("generic.")
    ]
    for form in forms:
        forward = _timing.seconds(lambda form=form: function(**arrays, method=form), least=least)
        mark = " (chosen)" if told.taken["forward"] == form else ""
        found.append(
            {"table": table, "form": f"{form}, forward{mark}", "ms": 1e3 * forward, "ratio": forward / plain}
        )

        def both(form=form):
            result, pullback = scanfield.vjp(function, **arrays, method=form)
            pullback(np.ones_like(result.output))

        gradients = _timing.seconds(both, least=least)
        found.append(
            {
                "table": table,
                "form": f"{form}, forward + backward",
                "ms": 1e3 * gradients,
                "ratio": gradients / plain,
            }
        )


def memory(quick: bool) -> list[dict[str, object]]:
    """The peak of forward and backward beyond the inputs, against time."""
    rng = np.random.default_rng(0)
    found: list[dict[str, object]] = []
    for time in (64, 128) if quick else (256, 1024, 4096, 16384):
        heads, size = 2, 32
        arrays = gdn2_inputs(time, heads, size, rng)
        _peak(found, "gdn2, 2 heads, K = V = 32", scanfield.gdn2, arrays, time, heads * size * size)
    for time in (64, 128) if quick else (256, 1024, 4096, 16384):
        channels, state = 32, 16
        arrays = selective_inputs(time, channels, state, rng)
        _peak(
            found,
            "selective_scan, 32 channels, 16 states",
            scanfield.selective_scan,
            arrays,
            time,
            channels * state,
        )
    return found


def _peak(found, name, function, arrays, time, state_size):
    def both():
        result, pullback = scanfield.vjp(function, **arrays)
        pullback(np.ones_like(result.output))

    peak, inputs = _timing.peak_bytes(both), sum(array.nbytes for array in arrays.values())
    found.append(
        {
            "table": f"memory of forward and backward: {name}",
            "time": time,
            "form": scanfield.explain(function, **arrays).taken["save"],
            "inputs MB": inputs / 1e6,
            "peak MB": peak / 1e6,
            "peak / inputs": peak / inputs,
            "a state a token MB": 4 * time * state_size / 1e6,
        }
    )


if __name__ == "__main__":
    asked = _timing.arguments(__doc__)
    _timing.show(speed(asked.quick) + memory(asked.quick), as_json=asked.json)
