"""What each rank of a torch.distributed group does in the tests."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import cards
import numpy as np
import torch
import torch.distributed as dist
import training
from examples import example, op_inputs, rng_of
from field.draws import G
from gates import changed

import scanfield
from scanfield import pinn
from scanfield.layers import GatedDeltaNet2, GatedDeltaNet2Config, MambaBlock
from scanfield_torch.parallel import GroupReducer, halo, layer_parallel, sequence_parallel, traffic

WHOLE = ("A", "D", "delta_bias", "dt_bias", "initial_state")
_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def start(rank: int, size: int, folder: str) -> None:
    """Join the group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def tensors(inputs: Mapping[str, np.ndarray], dtype: str) -> dict[str, torch.Tensor]:
    """Leaves of autograd."""
    complex_of = {"float64": torch.complex128, "float32": torch.complex64}[dtype]
    return {
        n: torch.tensor(x, dtype=complex_of if np.iscomplexobj(x) else _DTYPES[dtype], requires_grad=True)
        for n, x in inputs.items()
    }


class Whole:
    """One call on the whole sequence, to hold the ranks' parts to."""

    def __init__(self, op: str, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any], dtype: str):
        self.op, self.inputs, self.options, self.dtype = op, inputs, dict(options), dtype
        arrays = tensors(inputs, dtype)
        result = getattr(scanfield, op)(**arrays, **self.options)
        rng = rng_of(f"{op} cotangents")
        self.cotangents = [torch.tensor(_normal(rng, x), dtype=x.dtype) for x in result]
        torch.autograd.backward(result, self.cotangents)
        self.output, self.final_state = (x.detach() for x in result)
        self.gradients = {n: x.grad for n, x in arrays.items()}
        self.time = self.output.shape[1]

    def has_time(self, name: str) -> bool:
        """Whether an input is cut."""
        x = self.inputs[name]
        if name in WHOLE or (self.op == "retention" and name == "log_decay" and x.ndim == 1):
            return False
        return x.ndim >= 2 and x.shape[1] == self.time and not (name in "BC" and x.ndim == 2)

    def errors(self, cuts: Sequence[int], **how: Any) -> dict[str, float]:
        """The largest deviation of this rank's results, over the largest value of the whole."""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        ends = [0, *cuts, self.time]
        here = slice(ends[rank], ends[rank + 1])
        arrays = tensors(
            {n: x[:, here] if self.has_time(n) else x for n, x in self.inputs.items()}, self.dtype
        )
        result = sequence_parallel(getattr(scanfield, self.op), **arrays, **self.options, **how)
        own = how.get("states") == "own"
        # Every rank has the final state, one of them a loss on it.
        d_state = self.cotangents[1] if rank == last // 2 and not own else 0 * self.cotangents[1]
        if own:
            rows = self.own_rows(ends, rank)
            d_state = self.cotangents[1][rows]
        torch.autograd.backward(result, [self.cotangents[0][:, here], d_state])
        found = {
            "output": (result.output, self.output[:, here], self.output),
            "final_state": (
                result.final_state,
                self.final_state[rows] if own else self.final_state,
                self.final_state,
            ),
        }
        size = max(float(g.abs().max()) for g in self.gradients.values() if g.numel())
        for name, want in self.gradients.items():
            got = arrays[name].grad
            assert got is not None, f"rank {rank} has no gradient of {name}"
            if self.has_time(name):
                found[f"d {name}"] = (got, want[:, here], want)
            else:
                total = torch.view_as_real(got).clone() if got.is_complex() else got.clone()
                dist.all_reduce(total)
                got = torch.view_as_complex(total) if got.is_complex() else total
                found[f"d {name}"] = (got, want, want)
        return {
            name: _error(got, want, whole, size * 1e-2 if name.startswith("d ") else 0.0)
            for name, (got, want, whole) in found.items()
        }

    def own_rows(self, ends: Sequence[int], rank: int) -> list[int]:
        """The sequences whose final state belongs to this rank; of a dense batch all rows belong to the last."""
        reverse, bounds = self.options.get("reverse", False), self.options.get("cu_seqlens")
        size = len(ends) - 2
        if bounds is None:
            return list(range(self.final_state.shape[0])) if rank == (0 if reverse else size) else []
        found = []
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low == high:
                where = next((r for r in range(size + 1) if ends[r] <= low < ends[r + 1]), size)
            else:
                token = low if reverse else high - 1
                where = next(r for r in range(size + 1) if ends[r] <= token < ends[r + 1])
            if where == rank:
                found.append(i)
        return found


def _normal(rng: np.random.Generator, x: torch.Tensor) -> np.ndarray:
    drawn = rng.standard_normal(tuple(x.shape))
    return drawn + 1j * rng.standard_normal(tuple(x.shape)) if x.is_complex() else drawn


def _error(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor, floor: float) -> float:
    assert got.shape == want.shape, f"{tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype
    if not got.numel():
        return 0.0
    got, want, whole = (x.detach().numpy() for x in (got, want, whole))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if np.all(same):
        return 0.0
    largest = max(float(np.max(np.abs(whole[np.isfinite(whole)]), initial=0.0)), floor)
    return float(np.max(np.abs(got - want)[~same])) / largest


def worst(errors: Sequence[tuple[Any, dict[str, float]]]) -> list[tuple[float, str]]:
    """The largest error of each name, with the cut it was found at."""
    found: dict[str, tuple[float, str]] = {}
    for cut, row in errors:
        for name, error in row.items():
            if not error <= found.get(name, (-1.0, ""))[0]:
                found[name] = (error, f"{name} cut at {cut}")
    return sorted(found.values(), reverse=True)


# -- jobs --------------------------------------------------------------------------------------------------------------


def every_cut(
    op: str, dtype: str, cuts: Sequence[Sequence[int]], options: dict[str, Any], change: str
) -> Any:
    """A sequence of 130 tokens cut at each of these."""
    packed = "cu_seqlens" in options
    states = len(options["cu_seqlens"]) - 1 if packed else None
    inputs = changed(op_inputs(op, f"{op} of 130", 1 if packed else 2, 130, states=states), change)
    whole = Whole(op, inputs, options, dtype)
    rows = []
    for i, cut in enumerate(cuts):
        exchange = ("scan", "gather")[i % 2]
        rows.append((f"{list(cut)} by {exchange}", whole.errors(cut, exchange=exchange)))
    return worst(rows)


def examples_cut(names: Sequence[str], dtype: str, seed: int, own: bool) -> Any:
    """Small examples of every option, each cut at random (the same on every rank)."""
    rng = np.random.default_rng(seed)
    rows = []
    for name in names:
        case = example(name)
        cuts = sorted(int(c) for c in rng.integers(0, case.time + 1, dist.get_world_size() - 1))
        whole = Whole(case.op, case.inputs, case.options, dtype)
        how = {"states": "own"} if own else {}
        try:
            rows.append((f"{cuts} of {name}", whole.errors(cuts, **how)))
        except Exception as error:
            raise AssertionError(f"{name} cut at {cuts}: {error}") from error
    return worst(rows)


def layer_cut(kind: str, cuts: Sequence[int], packed: bool) -> dict[str, float]:
    """A block with a convolution, cut where the halo comes from more than one rank too."""
    layer = _block(kind).init(3, torch, dtype="float64")
    time_ = 23
    x = torch.tensor(rng_of(kind).standard_normal((1 if packed else 2, time_, 6)))
    bounds = [0, 4, 4, 15, 23] if packed else None
    d = torch.tensor(rng_of(f"{kind} d").standard_normal(tuple(x.shape)))
    result, pullback = layer.vjp(x, cu_seqlens=bounds)
    d_x, _, gradients = pullback(d)
    rank, ends = dist.get_rank(), [0, *cuts, time_]
    here = slice(ends[rank], ends[rank + 1])
    mine = x[:, here].clone().requires_grad_()
    own = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters().items()}
    y = layer_parallel(layer, mine, own, cu_seqlens=bounds)
    y.backward(d[:, here])
    found = {
        "y": _error(y, result.output[:, here], result.output, 0.0),
        "d x": _error(mine.grad, d_x[:, here], d_x, 0.0),
    }
    for name, p in own.items():
        dist.all_reduce(p.grad)
        found[f"d {name}"] = _error(p.grad, gradients[name], gradients[name], 0.0)
    return found


def _block(kind: str) -> Any:
    if kind == "MambaBlock":
        return MambaBlock(6, 3)
    return GatedDeltaNet2(6, GatedDeltaNet2Config(heads=2, latent_per_head=4))


class Model(torch.nn.Module):
    """A torch module around a sharded block, as somebody would train it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MambaBlock(6, 3).init(3, torch, dtype="float64")
        self.names = {n: n.replace(".", "_") for n in self.layer.named_parameters()}
        for name, p in self.layer.named_parameters().items():
            self.register_parameter(self.names[name], torch.nn.Parameter(p.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block on this rank's slice."""
        return layer_parallel(self.layer, x, {n: getattr(self, m) for n, m in self.names.items()})


def wrapped(kind: str, cuts: Sequence[int]) -> float:
    """DDP or FSDP around it: after one step of SGD the parameters of one machine."""
    # Dear imports, which most groups do without.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank, size, rng = dist.get_rank(), dist.get_world_size(), rng_of("wrapped")
    x, target = (torch.tensor(rng.standard_normal((1, 23, 6))) for _ in range(2))
    alone = Model()
    result, pullback = alone.layer.vjp(x)
    wanted = pullback(2 * (result.output - target))[2]
    model: Any = Model()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ends = [0, *cuts, 23]
    here = slice(ends[rank], ends[rank + 1])
    loss = ((model(x[:, here]) - target[:, here]) ** 2).sum() * size
    loss.backward()
    optimizer.step()
    found = dict(model.named_parameters())
    worst_ = 0.0
    for name, gradient in wanted.items():
        p = found[("module." if kind == "ddp" else "") + alone.names[name]]
        p = p.full_tensor() if isinstance(p, DTensor) else p
        want = getattr(alone, alone.names[name]) - 0.1 * gradient
        worst_ = max(worst_, float((p - want).detach().abs().max()))
    return worst_


class Straight(torch.nn.Module):
    """Parameters that a scan gets as they are, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        for name, x in op_inputs("selective_scan", "straight", 1, 5).items():
            if name in WHOLE:
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(x)))
        self.gate = torch.nn.Parameter(
            torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, compiled: bool, **moving: torch.Tensor) -> torch.Tensor:
        """Outputs of a batch of one."""
        run = (
            torch.compile(scanfield.selective_scan, backend="eager") if compiled else scanfield.selective_scan
        )
        whole = {n: p for n, p in self.named_parameters() if n != "gate"}
        return run(**moving, **whole, z=self.gate.T[None]).output


def straight(kind: str, compiled: bool) -> float:
    """Two steps of SGD on parameters that go straight into a scan, each rank with an element of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    drawn = op_inputs("selective_scan", "straight rows", size, 5)
    rows = {n: torch.tensor(x) for n, x in drawn.items() if n in ("u", "delta", "B", "C")}
    alone = Straight()
    model: Any = Straight()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    for module, mine in ((model, [rank]), (alone, range(size))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for row in mine:  # DDP and FSDP divide by the number of ranks
                y = module(compiled, **{n: x[row : row + 1] for n, x in rows.items()})
                (y.square().sum() / len(mine)).backward()
            optimizer.step()
    found = dict(model.named_parameters())
    worst_ = 0.0
    for name, want in alone.named_parameters():
        p = found[("module." if kind == "ddp" else "") + name]
        p = p.full_tensor() if isinstance(p, DTensor) else p
        worst_ = max(worst_, float((p - want).detach().abs().max()))
    return worst_


def counted(op: str, exchange: str, pack: Sequence[int] | None) -> dict[str, Any]:
    """Bytes that this rank exchanges, forward and backward, and the sizes of which they are made."""
    inputs = op_inputs(op, f"{op} counted", 1 if pack else 2, 12, states=len(pack) - 1 if pack else None)
    size, rank = dist.get_world_size(), dist.get_rank()
    each = 12 // size
    arrays = tensors(
        {n: x if n in WHOLE else x[:, rank * each : (rank + 1) * each] for n, x in inputs.items()}, "float32"
    )
    how = {"exchange": exchange, "states": "own"} | ({"cu_seqlens": pack} if pack else {})
    with traffic() as there:
        result = sequence_parallel(getattr(scanfield, op), **arrays, **how)
        forward = (there.sent, there.received)
        torch.autograd.backward(result, [torch.ones_like(x) for x in result])
    both = (there.sent, there.received)
    return {"forward": forward, "backward": tuple(b - f for b, f in zip(both, forward, strict=True))}


# -- refusals and failures -----------------------------------------------------------------------------------------------


def refused(what: str) -> Any:
    """A call in which one rank differs."""
    rank = dist.get_rank()
    inputs = tensors(op_inputs("gdn2", "gdn2 refused", 1, 6), "float64")
    options: dict[str, Any] = {}
    if what == "shape" and rank == 1:
        inputs["value"] = inputs["value"][..., :2]
        inputs["write"], inputs["initial_state"] = inputs["write"][..., :2], inputs["initial_state"][..., :2]
    if what == "dtype" and rank == 1:
        inputs = {n: x.detach().float().requires_grad_() for n, x in inputs.items()}
    if what == "bad" and rank == 1:
        inputs["key"] = inputs["key"][..., :2]
    if what == "absent" and rank == 1:
        del inputs["erase"]
    if what == "option":
        options["scale"] = 1.0 + rank
    if what == "bounds":
        options["cu_seqlens"] = [0, 3 + rank, 6 * dist.get_world_size()]
    if what == "short bounds":
        options["cu_seqlens"] = [0, 3, 7]
        del inputs["initial_state"]
    if what == "no_grad" and rank == 1:
        inputs = {n: x.detach() for n, x in inputs.items()}
    if what == "exchange":
        options["exchange"] = "ring"
    if what == "timeout":
        options["timeout"] = 0
    if what == "states_at":
        options["states_at"] = [1]
    if what == "keyword":
        options["gate"] = 1
    if what == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        inputs["key"] = DTensor.from_local(inputs["key"].detach(), mesh, [Shard(1)])
    if what == "func":
        torch.func.grad(lambda q: sequence_parallel(scanfield.gdn2, **{**inputs, "query": q}).output.sum())(
            inputs["query"]
        )
    if what == "twice":
        y = sequence_parallel(scanfield.gdn2, **inputs).output
        (g,) = torch.autograd.grad(y.sum(), inputs["query"], create_graph=True)
        g.sum().backward()
    return sequence_parallel(scanfield.gdn2, **inputs, **options)


def after_refusal() -> float:
    """The group still works."""
    rows = examples_cut(["gdn2: plain"], "float64", 0, False)
    return max(error for error, _ in rows)


def lost(rank: int, how: str, verb: str, seconds: float) -> str:
    """One rank dies, or is late; the others say which."""
    mine = dist.get_rank() == rank
    inputs = tensors(op_inputs("gdn2", "gdn2 lost", 1, 6), "float64")
    sequence_parallel(
        scanfield.gdn2, **inputs
    ).output.sum().backward()  # compiles what it needs without a limit
    if verb == "forward" and mine:
        _leave(how, seconds)
    result = sequence_parallel(scanfield.gdn2, **inputs, timeout=seconds)
    if mine:
        _leave(how, seconds)
    started = time.monotonic()
    try:
        result.output.sum().backward()
    finally:
        waited = time.monotonic() - started
    return f"went on after {waited:.1f} s"


def _leave(how: str, seconds: float) -> None:
    if how == "dies":
        os._exit(1)
    time.sleep(3 * seconds + 2)
    raise TimeoutError("late on purpose")


def train(optimizer: str) -> dict[str, Any]:
    """A training over the group."""
    return training.trained(optimizer, torch, GroupReducer())


def train_apart(what: str) -> Any:
    """One rank trains something else."""
    rank = dist.get_rank()
    features = pinn.FourierFeatures(1, 5, scale=1.0, seed=rank if what == "seed" else 1)
    kind = "float32" if what == "dtype" and rank == 1 else "float64"
    xp = np if what == "library" else torch
    network = pinn.Network.create(features, hidden=[6], outputs=1, seed=2, xp=xp, dtype=kind)
    points = 29 + (rank if what == "points" else 0)
    weights = "annealing" if what == "weights" else "fixed"
    return pinn.train(
        training.problem(), network, points=points, optimizer="adam", iterations=2, held_out=9,
        sampling="uniform", weights=weights, reducer=GroupReducer(), resample=None,
    )  # fmt: skip


def f061() -> dict[str, float]:
    """The input of a report: gradients ten percent wrong on all ranks but the last."""
    drawn = G(44, 1, 24, 2, 5, 3)
    inputs = drawn.inputs() | {"initial_state": drawn.state}
    return Whole("gdn2", inputs, {}, "float64").errors([10])


def halves(dtype: str) -> dict[str, float]:
    """Half precision in and out; the maps and the carry are float32."""
    rank, ends = dist.get_rank(), [0, 5, 12]
    here = slice(ends[rank], ends[rank + 1])
    inputs = {
        n: torch.tensor(x).to(getattr(torch, dtype)) for n, x in op_inputs("gdn2", "halves", 2, 12).items()
    }
    want = scanfield.gdn2(**inputs)
    part = {n: x if n == "initial_state" else x[:, here] for n, x in inputs.items()}
    got = sequence_parallel(scanfield.gdn2, **part)
    assert got.output.dtype == want.output.dtype
    assert got.final_state.dtype == torch.float32
    return {
        "output": float((got.output.float() - want.output[:, here].float()).abs().max()),
        "final_state": float((got.final_state - want.final_state).abs().max()),
    }


def alone() -> bool:
    """A group of one: the plain call, bit for bit, and nothing is sent."""
    inputs = tensors(op_inputs("gdn2", "alone", 2, 9), "float64")
    want = scanfield.gdn2(**inputs, reverse=True)
    with traffic() as counted:
        got = sequence_parallel(scanfield.gdn2, **inputs, reverse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    return counted.waits == 0


def on_cards(op: str, exchange: str, pack: Sequence[int] | None) -> dict[str, float]:
    """A call on a group that carries no tensors of the host, held to the same call over gloo."""
    rank, each = dist.get_rank(), 12 // dist.get_world_size()
    drawn = op_inputs(op, f"{op} on cards", 1 if pack else 2, 12, states=len(pack) - 1 if pack else None)
    turned = {"selective_scan": ("A",), "linear_scan": ("a", "b", "initial_state")}.get(op, ())
    drawn |= {n: drawn[n] * (1 + 0.5j) for n in turned}
    drawn = {n: x if n in WHOLE else x[:, rank * each : (rank + 1) * each] for n, x in drawn.items()}
    how = {"exchange": exchange, "method": "generic.recurrent", "cu_seqlens": pack}
    rng = rng_of(f"{op} cotangents of rank {rank}")

    def run(arrays: dict[str, torch.Tensor], d: Any = None, **group: Any) -> dict[str, torch.Tensor]:
        result = sequence_parallel(getattr(scanfield, op), **arrays, **how, **group)
        before = halo(result.output, 3, **group)
        d = [torch.tensor(_normal(rng, x), dtype=x.dtype) for x in result] if d is None else d
        torch.autograd.backward([*result, before], [*d, before.detach()])
        found = {"output": result.output, "final_state": result.final_state, "halo": before, "d": d}
        return found | {f"d {n}": x.grad for n, x in arrays.items()}

    want = run(tensors(drawn, "float64"))
    d = want.pop("d")
    group, given = cards.group(), {n: x.detach() for n, x in tensors(drawn, "float64").items()}
    with cards.OnCards():
        there = {n: cards.Card(x).requires_grad_() for n, x in given.items()}
        found = run(there, [cards.Card(x) for x in d], group=group)
    return {n: _error(found[n].numbers, x, x, 0.0) for n, x in want.items()}


def off_cards() -> None:
    """Rank 1 comes to a group of cards with arrays of the host."""
    inputs = op_inputs("linear_scan", "off cards", 1, 4)
    arrays = {n: torch.tensor(x) for n, x in inputs.items()}
    if dist.get_rank() == 0:
        arrays = {n: cards.Card(x) for n, x in arrays.items()}
    group = cards.group()
    with cards.OnCards():
        sequence_parallel(scanfield.linear_scan, **arrays, group=group)
