"""One sequence over four host devices under shard_map: results, and gradients through jit."""

from __future__ import annotations

import pytest
import training
from checks import TOLERANCE
from ranks import Ranks

pytestmark = pytest.mark.backend("jax")

# Each compiles for seconds. The others of the family are gdn2's arguments by another name, as in every other test of JAX.
OPERATIONS = ("linear_scan", "selective_scan", "gdn2", "ssd")


@pytest.fixture(scope="module")
def devices():
    with Ranks("jax_jobs", 1) as process:
        yield process


def check(
    devices: Ranks, op: str, count: int, exchange: str, options: dict, dtype="float64", drop=()
) -> None:
    (answer,) = devices.run("agreement", op, count, exchange, options, dtype, drop)
    for name, error in answer.items():
        assert error <= TOLERANCE[dtype], f"{op}: {name} deviates by {error:.1e}"


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation(devices: Ranks, op: str):
    check(devices, op, 4, "gather" if len(op) % 2 else "scan", {})


def test_directions_numbers_and_no_state(devices: Ranks):
    check(devices, "gdn2", 4, "gather", {"reverse": True})
    check(devices, "selective_scan", 4, "scan", {"reverse": True, "complex": True})
    check(devices, "gdn2", 2, "scan", {}, "float32", ("initial_state", "erase"))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("outside", "StateError", "jax.shard_map"),
        ("pack", "ArgumentError", "cu_seqlens"),
        ("exchange", "ArgumentError", "'ring'"),
        ("unchecked", "StateError", "check_vma"),
    ],
)
def test_refusals(devices: Ranks, what: str, kind: str, words: str):
    (answer,) = devices.answers("refused", what)
    assert answer[:2] == ("raised", kind) and words in answer[2]


def test_a_training_over_devices_is_one_devices(devices: Ranks):
    for optimizer in ("lbfgs", "lm"):
        ((found, want),) = devices.run("train", optimizer)
        training.same(found, want)
