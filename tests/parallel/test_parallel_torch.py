"""One sequence over the ranks of a torch.distributed group (gloo): results, gradients, refusals and failures."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import training
from checks import TOLERANCE
from examples import EXAMPLES, OPERATIONS
from ranks import Ranks

pytestmark = pytest.mark.backend("torch")

TIME = 130
# Reversed too, so that each operation is met in both directions.
REVERSED = ("linear_scan", "gdn2", "kda")


@pytest.fixture(scope="module")
def two():
    with Ranks("torch_jobs", 2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks("torch_jobs", 4) as ranks:
        yield ranks


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue({2: "two", 4: "four"}[request.param])


def cuts_of(size: int) -> list[list[int]]:
    """Every tenth place, the ends and twenty random ones: one at a time on two ranks, three at a time on four."""
    rng = np.random.default_rng(20)
    places = [*range(10, TIME, 10), 0, TIME, *map(int, rng.integers(1, TIME, 21))]
    mixed = [places[i] for i in rng.permutation(len(places))]
    mixed += mixed[: -len(mixed) % (size - 1)]
    return [sorted(mixed[i : i + size - 1]) for i in range(0, len(mixed), size - 1)]


def check(answers: list[list[tuple[float, str]]], limit: float) -> None:
    for rank, rows in enumerate(answers):
        assert rows
        for error, where in rows:
            assert error <= limit, f"rank {rank}: {where} deviates by {error:.1e}"


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_every_operation_cut_anywhere(group: Ranks):
    """130 tokens, forward and every gradient, in float64 and, at every fifth of the cuts, in float32."""
    for op in OPERATIONS:
        options = {"reverse": True} if op in REVERSED and group.size == 4 else {}
        check(group.run("every_cut", op, "float64", cuts_of(group.size), options, ""), TOLERANCE["float64"])
        check(
            group.run("every_cut", op, "float32", cuts_of(group.size)[::5], options, ""), TOLERANCE["float32"]
        )


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_packs_cut_inside_sequences_and_between(group: Ranks):
    pack = [0, 0, 3, 40, 40, 41, 100, 130, 130]
    for op in ("linear_scan", "selective_scan", "gdn2", "ssd", "gated_delta_product"):
        for options in ({"cu_seqlens": pack}, {"cu_seqlens": pack, "reverse": True}):
            check(
                group.run("every_cut", op, "float64", cuts_of(group.size)[::4], options, ""),
                TOLERANCE["float64"],
            )


def test_decay_of_minus_infinity_and_growth(four: Ranks):
    for op in ("linear_scan", "selective_scan", "gdn2", "kda"):
        for change in ("resets", "growth"):
            check(four.run("every_cut", op, "float64", cuts_of(4)[::3], {}, change), TOLERANCE["float64"])


@pytest.mark.parametrize(("group", "own"), [(2, False), (4, True)], indirect=["group"])
def test_every_option(group: Ranks, own: bool):
    """States of all sequences on every rank, and of those alone that end there."""
    names = [case.name for case in EXAMPLES]
    check(group.run("examples_cut", names, "float64", 3, own), TOLERANCE["float64"])


def test_f061_two_gloo_processes(two: Ranks):
    for answer in two.run("f061"):
        assert len(answer) == 9  # outputs, final state, seven gradients
        for name, error in answer.items():
            assert error <= 1e-12, name


@pytest.mark.parametrize(("dtype", "step"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_half_precision(two: Ranks, dtype: str, step: float):
    for answer in two.run("halves", dtype):
        assert answer["output"] <= step and answer["final_state"] <= 1e-5


@pytest.mark.parametrize("kind", ["MambaBlock", "GatedDeltaNet2"])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_look_back_over_several_ranks(four: Ranks, kind: str, packed: bool):
    for cuts in ([1, 2, 10], [5, 5, 9], [0, 22, 23]):
        for answer in four.run("layer_cut", kind, cuts, packed):
            for name, error in answer.items():
                assert error <= 1e-12, f"{name} cut at {cuts}"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped(two: Ranks, kind: str):
    for error in two.run("wrapped", kind, [9]):
        assert error <= 1e-12


@pytest.mark.parametrize(("kind", "compiled"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_parameters_go_straight_into_a_scan(two: Ranks, kind: str, compiled: bool):
    """FSDP frees a parameter's memory and fills it again: kernels may look at it, and not hold it."""
    for error in two.run("straight", kind, compiled):
        assert error <= 1e-12


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_bytes_are_those_of_the_formula(group: Ranks):
    """P for a state, Q for a map: rank r of a scan receives Q until what arrives begins at the first rank, then P."""
    size = group.size
    for op, P, M in (("gdn2", 2 * 4 * 3 * 4 * 4, 2 * 4 * 3 * 3 * 4), ("linear_scan", 2 * 3 * 4, 2 * 3 * 4)):
        Q = P + M
        forward = []
        for rank in range(size):
            held = [reach for reach in (0, 1, 2) if reach < rank]
            forward.append(sum(P if rank - max(reach, 1) <= reach or rank == 1 else Q for reach in held))
        found = group.run("counted", op, "scan", None)
        assert [answer["forward"][1] for answer in found] == forward
        assert [answer["backward"][1] for answer in found] == forward[::-1]
        assert sum(answer["forward"][0] for answer in found) == sum(forward)

        each = (size - 1) * (Q if size > 2 else P)
        for answer in group.run("counted", op, "gather", None):
            assert answer == {"forward": (each, each), "backward": (each, each)}


def test_a_pack_sends_nothing_where_no_sequence_is_cut(two: Ranks):
    for answer in two.run("counted", "gdn2", "scan", [0, 6, 12]):
        assert answer == {"forward": (0, 0), "backward": (0, 0)}


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("shape", "ShapeError", ["value: ", "(1, time, 4, 2)", "rank 1", "must agree"]),
        ("dtype", "DtypeError", ["float64", "float32", "rank 1"]),
        ("absent", "ArgumentError", ["erase", "None (no array) on rank 1"]),
        ("option", "ArgumentError", ["scale: 1.0 on rank 0, 2.0 on rank 1"]),
        ("bounds", "ArgumentError", ["cu_seqlens: [0,3,12]", "[0,4,12]"]),
        ("short bounds", "ShapeError", ["cu_seqlens: ends with 7", "12"]),
        ("no_grad", "ArgumentError", ["requires_grad", "False on rank 1"]),
        ("exchange", "ArgumentError", ["'ring'", "'scan', 'gather'"]),
        ("timeout", "ArgumentError", ["timeout: 0"]),
        ("states_at", "ArgumentError", ["states_at"]),
        ("keyword", "ArgumentError", ["'gate'", "'log_decay'"]),
        ("dtensor", "BackendError", ["key = key.to_local()"]),
        ("func", "BackendError", ["torch.func"]),
        ("twice", "BackendError", ["create_graph=True"]),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(two: Ranks, what: str, kind: str, words: list[str]):
    for answer in two.answers("refused", what):
        assert answer[:2] == ("raised", kind), answer
        for word in words:
            assert word in answer[2]
    for error in two.run("after_refusal"):  # and the group goes on
        assert error <= 1e-12


def test_a_rank_with_bad_arguments_is_named_on_the_others(two: Ranks):
    other, own = two.answers("refused", "bad")
    assert own[:2] == ("raised", "ShapeError")
    assert other[:2] == ("raised", "StateError") and "rank 1: ShapeError: key: shape (1, 6, 2, 2)" in other[2]


@pytest.mark.parametrize(("how", "verb", "size"), [("dies", "backward", 3), ("late", "forward", 2)])
def test_a_rank_that_does_not_come_is_named(how: str, verb: str, size: int):
    with Ranks("torch_jobs", size) as ranks:
        answers = ranks.answers("lost", 1, how, verb, 4.0)
    for rank in (0, 2)[: size - 1]:
        assert answers[rank][:2] == ("raised", "StateError"), answers[rank]
        assert "rank 1" in answers[rank][2] and "start again" in answers[rank][2]
        assert ("forward" if verb == "backward" else "backward") not in answers[rank][2]
    assert answers[1][0] == ("died" if how == "dies" else "raised")


@pytest.mark.parametrize("group", [4], indirect=True)
def test_a_training_over_ranks_is_one_machines(group: Ranks):
    for optimizer in training.OPTIMIZERS:
        want = training.trained(optimizer, importlib.import_module("torch"))
        found = group.run("train", optimizer)
        training.same(found[0], want)
        for other in found[1:]:
            for name, right in found[0].items():
                assert np.array_equal(other[name], right), f"ranks differ in {name}"


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("seed", "ShapeError", "network: float64"),
        ("dtype", "DtypeError", "float32"),
        ("points", "ArgumentError", "30 points on rank 1"),
        ("library", "BackendError", "xp=torch"),
        ("weights", "ArgumentError", "weights = 'annealing'"),
    ],
)
def test_ranks_that_train_apart_are_refused(two: Ranks, what: str, kind: str, words: str):
    for answer in two.answers("train_apart", what):
        assert answer[:2] == ("raised", kind) and words in answer[2], answer


def test_a_group_of_cards_meets_nothing_of_the_host(two: Ranks):
    """What NCCL would refuse, over a group that refuses it: headers, flags and states are made on the arrays' device."""
    pack = [0, 3, 9, 12]
    for op, exchange, bounds in (
        ("linear_scan", "scan", None),
        ("gdn2", "gather", pack),
        ("selective_scan", "gather", None),
        ("selective_scan", "scan", pack),
    ):
        for answer in two.run("on_cards", op, exchange, bounds):
            for name, error in answer.items():
                assert error == 0, f"{op}: {name}"
    other, own = two.answers("off_cards")
    assert own[:2] == ("raised", "DeviceError"), own
    assert "a: on cpu; this group (back end cards) carries tensors on meta: a = a.to('meta')" in own[2]
    assert other[:2] == ("raised", "StateError") and "rank 1: DeviceError: a: on cpu" in other[2]


def test_a_group_of_one_is_the_plain_call():
    with Ranks("torch_jobs", 1) as one:
        assert one.run("alone") == [True]
        for error in one.run("layer_cut", "MambaBlock", [], False)[0].values():
            assert error <= 1e-12
