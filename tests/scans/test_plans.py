"""A step made ready as the one before it: the same results and errors as without, and nothing kept alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from examples import BASE

import scanfield
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.scans import launches, plans, surface

pytestmark = pytest.mark.backend("numpy")


def token(op: str, seed: int, batch: int = 2) -> dict[str, np.ndarray]:
    """A state and one token's arrays."""
    rng = np.random.default_rng(seed)
    shapes = {
        "linear_scan": {"state": (batch, 3), "a": (batch, 3), "b": (batch, 3)},
        "selective_scan": {
            "state": (batch, 4, 3), "u": (batch, 4), "delta": (batch, 4), "A": (4, 3), "B": (batch, 3), "C": (batch, 3),
        },
        "gdn2": {
            "state": (batch, 2, 5, 3), "query": (batch, 2, 5), "key": (batch, 2, 5), "value": (batch, 2, 3),
            "log_decay": (batch, 2), "erase": (batch, 2, 5),
        },
    }[op]  # fmt: skip
    return {name: rng.random(shape) - (name == "log_decay") for name, shape in shapes.items()}


@pytest.fixture
def built(monkeypatch):
    """How often a call found a plan; no call has a launcher, which would be asked before."""
    monkeypatch.setattr(surface, "_PLANS", plans.Plans())
    monkeypatch.setattr(launches.Launches, "run", lambda *_: None)
    monkeypatch.setattr(launches.Launches, "note", lambda *_: None)
    found: list[bool] = []
    get = plans.Plans.get

    def counted(self, key):
        plan = get(self, key)
        found.append(plan is not None)
        return plan

    monkeypatch.setattr(plans.Plans, "get", counted)
    return found


@pytest.mark.parametrize("op", BASE)
def test_a_planned_step_is_the_same(op: str, built):
    step = getattr(scanfield, op).step
    for seed in range(3):
        given = token(op, seed)
        names = [name for name in given if name != "state"]
        output, state = step(**given)
        taken = len(built)
        # One token of the whole scan, made ready without a plan.
        shared = ("A",) if op == "selective_scan" else ()
        whole = {name: given[name] if name in shared else given[name][:, None] for name in names}
        wanted = getattr(scanfield, op)(**whole, initial_state=given["state"], states_at=[])
        del built[taken:]
        np.testing.assert_allclose(output, wanted.output[:, 0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(state, wanted.final_state, rtol=1e-12, atol=1e-14)
    assert built[1:] == [True, True]


@pytest.mark.parametrize("op", BASE)
def test_a_planned_call_is_the_same(op: str, built):
    """Whole calls: the kind of the arguments counts, not what they hold, where they lie or who asks."""
    call = getattr(scanfield, op)
    for seed, dtype in ((0, float), (1, float), (2, "float32"), (3, "float32"), (4, float)):
        given = {name: x.astype(dtype) for name, x in token(op, seed).items()}
        state = given.pop("state")
        # Time is a view with strides of its own every other time, of another length each time but the last.
        length = 3 + seed % 4
        for name, x in given.items():
            if name != "A":
                x = x[:, None] * np.linspace(1, 2, length, dtype=dtype).reshape(-1, *(1,) * (x.ndim - 1))
                given[name] = np.asarray(x if seed % 2 else x[:, ::-1], dtype)
        with scanfield.use(method="generic" if seed == 3 else None):
            output, last = call(**given, initial_state=state)
            wanted = call(**given, initial_state=state, states_at=[])
        assert output.dtype == np.dtype(dtype)
        assert np.array_equal(output, wanted.output)
        assert np.array_equal(last, wanted.final_state)
    assert built == [found for planned in (False, False, False, False, True) for found in (planned, False)]


def test_what_is_more_than_shapes_is_no_plan(built):
    """Flipped time, packs, promoted dtypes and values that the call itself makes."""
    rng = np.random.default_rng(0)
    a, b = rng.random((1, 5, 3)), rng.random((1, 5, 3))
    single = a.astype("float32")
    for options in (
        {"reverse": True},
        {"cu_seqlens": (0, 2, 5)},
        {"cu_seqlens": np.array([0, 2, 5])},
        {"chunk_size": np.int64(2)},
    ):
        for _ in range(2):
            scanfield.linear_scan(a, b, **options)
            scanfield.linear_scan(single, b, **options)
    assert not any(built)
    # Bounds of the same number and other values.
    for bounds in ([0, 2, 5], [0, 3, 5]):
        first, second = (
            scanfield.linear_scan(a[:, i:j], b[:, i:j]).output for i, j in ((0, bounds[1]), (bounds[1], 5))
        )
        packed = scanfield.linear_scan(a, b, cu_seqlens=np.array(bounds)).output
        assert np.array_equal(packed, np.concatenate([first, second], 1))
    flipped = scanfield.linear_scan(a[:, ::-1], b[:, ::-1]).output[:, ::-1]
    assert np.array_equal(scanfield.linear_scan(a, b, reverse=True).output, flipped)


def test_errors_of_whole_calls_come_after_a_plan_too(built):
    a = np.full((1, 4, 2), 0.5)
    for _ in range(2):
        scanfield.linear_scan(a, a)
    assert built == [False, True]
    with pytest.raises(ArgumentError, match="reverse"):
        scanfield.linear_scan(a, a, reverse=0)
    with pytest.raises(ArgumentError, match="chunk_size"):
        scanfield.linear_scan(a, a, chunk_size=True)
    with pytest.raises(DtypeError, match="b"):
        scanfield.linear_scan(a, a.astype(int))
    with pytest.raises(ShapeError, match="b"):
        scanfield.linear_scan(a, a[:, :3])
    with pytest.raises(ArgumentError, match="method"):
        scanfield.linear_scan(a, a, method="no such")


def test_one_array_in_two_places_first(built):
    """What was one object in the first call may be two in the next."""
    given = token("gdn2", 7, batch=3)
    scanfield.gdn2.step(**{**given, "key": given["query"]})
    output, state = scanfield.gdn2.step(**given)
    fresh = {name: np.array(x[:1]) for name, x in given.items()}
    alone_output, alone_state = scanfield.gdn2.step(**fresh)
    assert built == [False, True, False]
    assert np.array_equal(output[:1], alone_output)
    assert np.array_equal(state[:1], alone_state)


def test_options_that_are_equal_but_not_the_same():
    given = token("gdn2", 1)
    scanfield.gdn2.step(**given, qk_l2norm=False)
    with pytest.raises(ArgumentError, match="qk_l2norm"):
        scanfield.gdn2.step(**given, qk_l2norm=0)
    assert plans.key_of([0.0]) != plans.key_of([-0.0])
    assert plans.key_of([True]) is not None
    assert len({plans.key_of([1]), plans.key_of([1.0]), plans.key_of([True])}) == 3
    one, _ = scanfield.gdn2.step(**given, scale=1.0)
    half, _ = scanfield.gdn2.step(**given, scale=0.5)
    assert np.array_equal(half, one * 0.5)


def test_normalised_keys_are_no_plan():
    given = token("gdn2", 2)
    first, _ = scanfield.gdn2.step(**given, qk_l2norm=True)
    other = {**given, "query": given["query"] * 4}
    np.testing.assert_allclose(scanfield.gdn2.step(**other, qk_l2norm=True)[0], first, rtol=1e-5)


def test_errors_come_after_a_plan_too():
    given = token("gdn2", 3)
    scanfield.gdn2.step(**given)
    with pytest.raises(ShapeError, match="value"):
        scanfield.gdn2.step(**{**given, "value": given["value"][:, :1]})
    with pytest.raises(DtypeError, match="value"):
        scanfield.gdn2.step(**{**given, "value": given["value"].astype(int)})
    with pytest.raises(ArgumentError, match="query"):
        scanfield.gdn2.step(**{**given, "query": None})


def test_a_plan_keeps_no_array_alive():
    given = token("gdn2", 4, batch=5)
    scanfield.gdn2.step(**given)
    output, state = scanfield.gdn2.step(**given)
    kept = [weakref.ref(x) for x in (*given.values(), output, state)]
    del given, output, state
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_plans_do_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(plans.Plans, "most", 2)
    for batch in range(1, 6):
        given = token("linear_scan", 5, batch=batch)
        assert scanfield.linear_scan.step(**given)[0].shape == (batch, 3)
