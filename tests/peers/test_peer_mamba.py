"""Mamba's published reference functions against ours.

`selective_scan_ref` computes in float32 whatever it is given; `ssd_minimal_discrete` (Listing 1 of the Mamba-2 paper) and
the decoding reference stay in float64. The package itself needs Triton and a compiled extension at import, so only
these functions are compiled, from its files.
"""

from __future__ import annotations

import arrays
import numpy as np
import pytest
from agreement import agree
from loading import load_functions

import scanfield

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="mamba's references are PyTorch")
einops = pytest.importorskip("einops", reason="mamba's references use einops")

SURROUNDINGS = {
    "torch": torch,
    "F": torch.nn.functional,
    "rearrange": einops.rearrange,
    "repeat": einops.repeat,
}
BATCH, T, CHANNELS, STATE, GROUPS = 2, 37, 6, 4, 3


def reference(relative: str, *names: str):
    """The first of the named functions; the others are what it calls."""
    return load_functions("mamba_ssm", relative, names, SURROUNDINGS)[names[0]]


def to_theirs(x):
    """(batch, time, ...) to their (batch, ..., time)."""
    return x.movedim(1, -1) if x.ndim > 2 else x


SHAPES = {
    "constant": (CHANNELS, STATE),
    "shared": (BATCH, T, STATE),
    "grouped": (BATCH, T, GROUPS, STATE),
}


def draw(seed: int, b: str, c: str, extras: bool) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    inputs = {
        "u": r.standard_normal((BATCH, T, CHANNELS)),
        "delta": r.standard_normal((BATCH, T, CHANNELS)),
        "A": -r.uniform(0.5, 2, (CHANNELS, STATE)),
        "B": r.standard_normal(SHAPES[b]),
        "C": r.standard_normal(SHAPES[c]),
    }
    if extras:
        inputs["D"] = r.standard_normal(CHANNELS)
        inputs["z"] = r.standard_normal((BATCH, T, CHANNELS))
        inputs["delta_bias"] = r.uniform(-1, 1, CHANNELS)
    return inputs


@pytest.mark.parametrize("extras", [True, False], ids=["all options", "bare"])
@pytest.mark.parametrize(
    ("b", "c"),
    [("shared", "shared"), ("constant", "grouped"), ("grouped", "constant"), ("grouped", "grouped")],
)
def test_selective_scan(b, c, extras):
    function = reference("ops/selective_scan_interface.py", "selective_scan_ref")

    def peer(u, delta, A, B, C, D=None, z=None, delta_bias=None):
        z = None if z is None else to_theirs(z)
        output, state = function(
            to_theirs(u), to_theirs(delta), A, to_theirs(B), to_theirs(C), D, z, delta_bias,
            delta_softplus=True, return_last_state=True,
        )  # fmt: skip
        return output.transpose(1, 2), state

    agree(scanfield.selective_scan, peer, draw(30, b, c, extras), options={"delta_softplus": True})


def test_complex_selective_scan():
    """Complex A with complex, time-dependent B and C; the real output is twice the real part. Forward only: they
    interleave the parts of B and C in real arrays, so the gradients are of other arrays."""
    function = reference("ops/selective_scan_interface.py", "selective_scan_ref")
    r = np.random.default_rng(31)

    def cx(*shape):
        return (r.standard_normal(shape) + 1j * r.standard_normal(shape)).astype(np.complex64)

    u = r.standard_normal((BATCH, T, CHANNELS)).astype(np.float32)
    delta = r.uniform(0.05, 0.5, (BATCH, T, CHANNELS)).astype(np.float32)
    A = (-r.uniform(0.5, 2, (CHANNELS, STATE)) + 1j * r.standard_normal((CHANNELS, STATE))).astype(
        np.complex64
    )
    B, C = cx(BATCH, T, STATE), cx(BATCH, T, STATE)

    def interleaved(x):
        return torch.view_as_real(to_theirs(torch.tensor(x)).contiguous()).flatten(-2)

    output, state = function(
        *(to_theirs(torch.tensor(x)) for x in (u, delta)), torch.tensor(A), interleaved(B), interleaved(C),
        return_last_state=True,
    )  # fmt: skip
    ours = scanfield.selective_scan(*(torch.tensor(x) for x in (u, delta, A, B, C)))
    library = arrays.library("torch")
    assert library.dtype(ours.output) == "float32" and library.dtype(ours.final_state) == "complex64"
    assert arrays.deviation(library.raw(ours.output), library.raw(output.transpose(1, 2))) <= 1e-6
    assert arrays.deviation(library.raw(ours.final_state), library.raw(state)) <= 1e-6


def dual(seed: int, time: int, groups: int, heads: int = 4) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    return {
        "x": r.standard_normal((BATCH, time, heads, 3)),
        "dt": r.uniform(0.05, 0.5, (BATCH, time, heads)),
        "A": -r.uniform(0.5, 2, heads),
        "B": r.standard_normal((BATCH, time, groups, 5)),
        "C": r.standard_normal((BATCH, time, groups, 5)),
        "initial_state": r.standard_normal((BATCH, heads, 3, 5)),
    }


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_ssd_minimal_discrete_in_float64(groups):
    """The paper's listing takes dt * x and dt * A, and B and C once a head; lengths in whole blocks."""
    function = reference("modules/ssd_minimal.py", "ssd_minimal_discrete", "segsum")

    def peer(x, dt, A, B, C, initial_state):
        B, C = (v.repeat_interleave(4 // groups, dim=2) for v in (B, C))
        return function(x * dt[..., None], dt * A, B, C, 16, initial_states=initial_state[:, None])

    agree(scanfield.ssd, peer, dual(32, 64, groups), peer_dtype="float64", tolerance=1e-12)


@pytest.mark.parametrize("grouped", [True, False], ids=["heads", "flat"])
def test_selective_state_update_in_float64(grouped):
    """Twenty decoding steps of Mamba-2's and of Mamba-1's form; theirs overwrites the state."""
    function = reference("ops/triton/selective_state_update.py", "selective_state_update_ref")
    library = arrays.library("torch")
    r = np.random.default_rng(33)

    def tensor(*shape):
        return torch.tensor(r.standard_normal(shape))

    heads, size = (4, 3) if grouped else (1, CHANNELS)
    A = -torch.tensor(r.uniform(0.5, 2, heads if grouped else (size, 5)))
    D, bias = tensor(heads if grouped else size), tensor(heads if grouped else size)
    theirs = tensor(BATCH, heads, size, 5) if grouped else tensor(BATCH, size, 5)
    ours = theirs.clone()
    for _ in range(20):
        if grouped:
            x, dt, B, C = tensor(BATCH, 4, 3), tensor(BATCH, 4), tensor(BATCH, 2, 5), tensor(BATCH, 2, 5)
            ours_y, ours = scanfield.ssd.step(ours, x, dt, A, B, C, D, bias, dt_softplus=True)
            wide = (
                dt[..., None].expand(BATCH, 4, 3),
                A[:, None, None].expand(4, 3, 5),
                B,
                C,
                D[:, None].expand(4, 3),
            )
            theirs_y = function(theirs, x, *wide, dt_bias=bias[:, None].expand(4, 3), dt_softplus=True)
        else:
            u, delta, z = tensor(BATCH, size), tensor(BATCH, size), tensor(BATCH, size)
            B, C = tensor(BATCH, 5), tensor(BATCH, 5)
            ours_y, ours = scanfield.selective_scan.step(
                ours, u, delta, A, B, C, D, z, bias, delta_softplus=True
            )
            theirs_y = function(theirs, u, delta, A, B, C, D, z=z, dt_bias=bias, dt_softplus=True)
        assert arrays.deviation(library.raw(ours_y), library.raw(theirs_y)) <= 1e-12
        assert arrays.deviation(library.raw(ours), library.raw(theirs)) <= 1e-12
