"""Whole models of transformers on scanfield beside their own slow path, and their relevance beside autograd, in one run.

Random weights, float32, median CPU time of one thread; the peers take turns with scanfield, and what they compute is
compared first. Beside each figure stands a bound of the same run: for a whole model, upstream's own with a recurrence
that costs nothing (convolutions run on scanfield too, so a model may do better than that); for a recurrence, its compiled
kernels alone; for relevance, a forward pass alone.

    python benchmarks/models.py
    python benchmarks/models.py --only prefill relevance
    python benchmarks/models.py --json
    python benchmarks/models.py --output docs/performance-models.json
    python benchmarks/models.py --quick                                   # small sizes: does it run?
"""

from __future__ import annotations

import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from scans_numpy import Row, machine, print_rows, row
from transformers import MambaConfig, MambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers import logging as told

import scanfield
from scanfield.compat import transformers as compat
from scanfield.lrp import explain
from scanfield_numpy import threads

WHOLE = "Whole models of transformers, beside their own slow path"
INSIDE = "The recurrences of these models alone"
RELEVANCE = "Relevance of a model's tokens"
EXACT = "How exact"
ABOUT = (
    "The bound of a whole model is its own slow path with a recurrence that costs nothing; as convolutions run on scanfield "
    "too, a model may do better. Qwen3-Next has 8 value heads of 64, 4 experts of width 128, two for each token, and one "
    "more for all. A recurrence alone gets the arrays as they lie in its own model: behind scanfield's convolution a "
    "token's channels side by side, behind the slow path's turned. Models of transformers with random weights, beside their "
    "own slow paths; processor time of one thread"
)
MAMBA = "transformers.models.mamba.modeling_mamba"
QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


# -- models ------------------------------------------------------------------------------------------------------------
def mamba(layers: int, quick: bool) -> Any:
    """Mamba's 130M shape, a vocabulary that leaves the layers most of the time, biases in the convolutions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 4} if quick else {"hidden_size": 768, "state_size": 16}
    model = MambaForCausalLM(MambaConfig(vocab_size=1024, num_hidden_layers=layers, **sizes)).eval()
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer.conv1d.bias.uniform_(-0.1, 0.1)
    return model


def qwen3_next(quick: bool) -> Any:
    """Three layers of the gated delta rule and one of attention; experts a quarter as wide as the rest, as published.

    With wider ones, or more for each token, what is not the rule would take most of the time: even with a rule that
    costs nothing the model would then be less than 1.4 times as fast at 2,048 tokens.
    """
    torch.manual_seed(0)
    hidden = 64 if quick else 512
    config = Qwen3NextConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=hidden // 4, shared_expert_intermediate_size=hidden // 4, pad_token_id=0,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


def tokens(time: int) -> torch.Tensor:
    """One row."""
    return torch.randint(3, 1024, (1, time), generator=torch.Generator().manual_seed(1))


# -- calls -------------------------------------------------------------------------------------------------------------
Call = Callable[[], Any]


def accelerated(model: Any, call: Call) -> Call:
    """The call with the model's layers on scanfield."""

    def run() -> Any:
        with compat.accelerate(model):
            return call()

    return run


@contextlib.contextmanager
def replaced(module: str, **functions: Any) -> Iterator[None]:
    """Other functions in the place of a module's own."""
    place = sys.modules[module]
    before = {name: getattr(place, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(place, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(place, name, function)


def with_free_scan(module: str, call: Call) -> Call:
    """The call with recurrences that cost nothing, and give something of the right shape."""

    def scan(u: Any, dt: Any, A: Any, *args: Any, return_last_state: bool = False, **kwargs: Any) -> Any:
        return (u, u.new_zeros(*u.shape[:2], A.shape[1])) if return_last_state else u

    def step(state: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    def rule(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        return value, None

    free = (
        {"mamba_selective_scan": scan, "mamba_selective_state_update": step}
        if module == MAMBA
        else {"torch_chunk_gated_delta_rule": rule, "torch_recurrent_gated_delta_rule": rule}
    )

    def run() -> Any:
        with replaced(module, **free):
            return call()

    return run


@contextlib.contextmanager
def kernels_timed() -> Iterator[list[float]]:
    """CPU seconds that pass in compiled kernels, in the list's only place."""
    taken = [0.0]

    def run(*args: Any, **kwargs: Any) -> None:
        start = process_time()
        threads.run(*args, **kwargs)
        taken[0] += process_time() - start

    with replaced("scanfield_numpy.gated_delta", run=run), replaced("scanfield_numpy.selective", run=run):
        yield taken


def prefilled(model: Any, ids: torch.Tensor) -> Call:
    """The logits of a prompt."""

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(ids, use_cache=False).logits

    return run


def trained(model: Any, ids: torch.Tensor) -> Call:
    """Forward, loss, backward; the gradients."""

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return run


def inside(module: str, name: str, call: Call) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What a module's function is called with last, and the function."""
    original = getattr(sys.modules[module], name)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    with replaced(module, **{name: watched}):
        call()
    return *seen[-1], original


def detached(value: Any, *, grad: bool) -> Any:
    """A leaf of its own, in memory as the model has it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(grad and value.is_floating_point())


def alone(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any, *, grad: bool) -> Call:
    """A call of a function on tensors of its own: its output, or the gradients of all of them."""
    args = tuple(detached(x, grad=grad) for x in args)
    kwargs = {n: detached(x, grad=grad) for n, x in kwargs.items()}
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    cotangent: list[torch.Tensor] = []

    def run() -> Any:
        with contextlib.nullcontext() if grad else torch.no_grad():
            output = function(*args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
            if not grad:
                return output
            if not cotangent:
                cotangent.append(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)))
            return torch.autograd.grad(output, leaves, cotangent[0])

    return run


def checked(found: Any, wanted: Any, what: str, tolerance: float) -> float:
    """The largest deviation of any; stop if it is too large."""
    found, wanted = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (found, wanted))
    # What is left of gradients that cancel is no measure.
    largest = max(float(x.abs().max()) for x in wanted)
    error = max(
        float((x - y).abs().max()) / max(float(y.abs().max()), 1e-2 * largest)
        for x, y in zip(found, wanted, strict=True)
    )
    if not error <= tolerance:
        raise SystemExit(f"{what}: scanfield and the peer differ by {error:.1e}")
    return error


def timed(calls: dict[str, Call], quick: bool) -> dict[str, float]:
    """Milliseconds of each."""
    taken = _timing.rivals(calls, least=0.02 if quick else 0.5, rounds=3)
    return {name: 1e3 * seconds for name, seconds in taken.items()}


def whole(
    module: str, work: str, model: Any, call: Call, least: float, tolerance: float, quick: bool
) -> Iterator[Row]:
    """A model beside itself, and its bound."""
    ours = accelerated(model, call)
    copies = [[x.clone() for x in ([y] if isinstance(y, torch.Tensor) else y)] for y in (ours(), call())]
    error = checked(*copies, work, tolerance)
    ms = timed({"ours": ours, "slow": call, "free": with_free_scan(module, call)}, quick)
    bound = ms["slow"] / ms["free"]
    yield row(
        WHOLE, work, "its own slow path", ms["slow"] / ms["ours"], least=least,
        note=f"with a recurrence that costs nothing: {bound:.3g}", **{"ms": ms["ours"], "peer ms": ms["slow"]},
        bound=f"With a recurrence that costs nothing the model would reach {bound:.3g}.",
    )  # fmt: skip
    yield row(EXACT, work, "its own slow path", error, most=tolerance, unit="of the largest")


def recurrence(
    module: str, name: str, work: str, model: Any, call: Call, least: float, quick: bool, *, grad: bool
) -> Iterator[Row]:
    """The function that the model calls, each on what its own model calls it with: convolutions lay it out in memory."""
    slow = alone(*inside(module, name, call), grad=grad)
    with compat.accelerate(model):
        fast = alone(*inside(module, name, call), grad=grad)
        frame = compat._hooked.Frame()

        def on_scanfield() -> Any:
            compat._hooked.frames.enter(frame, None)
            try:
                return fast()
            finally:
                compat._hooked.frames.leave()

        checked(on_scanfield(), slow(), work, 2e-4)
        ms = timed({"ours": on_scanfield, "slow": slow}, quick)
        with kernels_timed() as taken:
            share = [_timing.once(on_scanfield) for _ in range(5)]
        share = min(taken[0] / sum(share), 1.0)
    bound = ms["slow"] / (ms["ours"] * share)
    yield row(
        INSIDE, work, "transformers' own function", ms["slow"] / ms["ours"], least=least,
        note=f"the compiled kernels alone: {bound:.3g}", **{"ms": ms["ours"], "peer ms": ms["slow"]},
        bound=f"{share:.0%} of scanfield's time pass in compiled kernels; these alone would reach {bound:.3g}.",
    )  # fmt: skip


# -- rows --------------------------------------------------------------------------------------------------------------
def prefill(quick: bool) -> Iterator[Row]:
    """A prompt through Mamba."""
    model, time = mamba(2, quick), 64 if quick else 1024
    call = prefilled(model, tokens(time))
    yield from whole(MAMBA, f"Mamba, 130M shape, 2 layers: {time} tokens", model, call, 3.3, 1e-4, quick)
    yield from recurrence(
        MAMBA, "mamba_selective_scan", f"scan of Mamba, {time} tokens", model, call, 25.0, quick, grad=False
    )


def training(quick: bool) -> Iterator[Row]:
    """A step of training of Mamba."""
    model, time = mamba(2, quick).train(), 32 if quick else 256
    call = trained(model, tokens(time))
    work = f"Mamba, 130M shape, 2 layers: forward and backward, {time} tokens"
    yield from whole(MAMBA, work, model, call, 15.0, 1e-3, quick)


def qwen(quick: bool) -> Iterator[Row]:
    """The same of Qwen3-Next."""
    name = "torch_chunk_gated_delta_rule"
    for grad, time, rule, least in ((False, 2048, 10.0, 1.4), (True, 512, 4.0, 1.2)):
        time = 128 if quick else time
        model = qwen3_next(quick)
        call = trained(model.train(), tokens(time)) if grad else prefilled(model, tokens(time))
        what = "forward and backward, " if grad else ""
        yield from whole(
            QWEN, f"Qwen3-Next, 4 layers, hidden 512: {what}{time} tokens", model, call, least, 1e-3 if grad else 1e-4, quick
        )  # fmt: skip
        yield from recurrence(
            QWEN, name, f"gated delta rule of Qwen3-Next, {what}{time} tokens", model, call, rule, quick, grad=grad
        )  # fmt: skip


def decode(quick: bool) -> Iterator[Row]:
    """Token by token behind a short prompt."""
    model, time = mamba(2, quick), 16 if quick else 256
    ids = tokens(time + 8)

    @torch.no_grad()
    def run() -> Any:
        cache = model(ids[:, :8], use_cache=True).cache
        for t in range(8, time + 8):
            cache = model(ids[:, t : t + 1], cache=cache, use_cache=True).cache
        return [cache.get_recurrent_state(layer, state_idx=0).clone() for layer in range(2)]

    work = f"Mamba, 130M shape, 2 layers: {time} tokens one by one"
    with torch.no_grad():
        at_once = model(ids, use_cache=True).cache
    error = checked(
        accelerated(model, run)(),
        [at_once.get_recurrent_state(layer, state_idx=0) for layer in range(2)],
        work,
        1e-4,
    )
    ms = timed({"ours": accelerated(model, run), "slow": run, "free": with_free_scan(MAMBA, run)}, quick)
    bound = ms["slow"] / ms["free"]
    yield row(
        WHOLE, work, "its own slow path", ms["slow"] / ms["ours"], least=1.0,
        note=f"with a recurrence that costs nothing: {bound:.3g}", **{"ms": ms["ours"], "peer ms": ms["slow"]},
        bound=f"With a recurrence that costs nothing the model would reach {bound:.3g}.",
    )  # fmt: skip
    yield row(EXACT, f"state after {work}", "all at once", error, most=1e-5, unit="of the largest")


def relevance(quick: bool) -> Iterator[Row]:
    """Which tokens made the last logit of a Mamba."""
    model, time = mamba(4, quick), 32 if quick else 512
    ids = tokens(time)
    work = f"Mamba, 130M shape, 4 layers: {time} tokens"
    found = explain(model, ids, 7)
    given: dict[str, Any] = {}
    calls: dict[str, Call] = {
        "ours": lambda: given.update(ours=explain(model, ids, 7).tokens),
        "autograd": lambda: given.update(autograd=by_autograd(model, ids, 7)),
    }
    # Autograd takes half a minute, and has no first-use costs beside that: two turns do.
    turns = [{name: _timing.once(call) for name, call in calls.items()} for _ in range(2)]
    ms = {name: 1e3 * min(turn[name] for turn in turns) for name in calls}
    wanted, logit = given["autograd"]
    checked([given["ours"]], [wanted], work, 1e-3)
    report = found.report
    rest = report.sum_out - report.sum_in - report.to_bias
    peer = "MambaLRP's detached factors by autograd, on transformers' loop over tokens"
    forward = accelerated(model, prefilled(model, ids))
    forward()
    bound = ms["autograd"] / (1e3 * min(_timing.once(forward) for _ in range(3)))
    yield row(
        RELEVANCE, work, peer, ms["autograd"] / ms["ours"], least=10.0,
        note=f"scanfield's forward pass alone: {bound:.3g}", **{"ms": ms["ours"], "peer ms": ms["autograd"]},
        bound=f"Scanfield's forward pass of the model, without any relevance, would reach {bound:.3g}.",
    )  # fmt: skip
    yield row(
        EXACT, f"sum of relevance, {work}", f"the logit; without the share of biases {float(1 - wanted.sum() / logit):.1e}",
        float((rest.abs() / report.sum_out.abs()).max()), most=1e-5, unit="of the logit",
    )  # fmt: skip


def by_autograd(model: Any, ids: torch.Tensor, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MambaLRP as its paper gives it: the forward unchanged, factors detached, gradient times input."""
    backbone = model.backbone
    e = backbone.embeddings(ids).detach().requires_grad_()
    x = e
    for block in backbone.layers:
        x = x + _detached_mixer(block.mixer, _detached_norm(block.norm, x))
    logit = model.lm_head(_detached_norm(backbone.norm_f, x)[0, -1])[target]
    (grad,) = torch.autograd.grad(logit, e)
    return (e * grad).sum(-1).detach(), logit.detach()


def _detached_norm(norm: Any, x: Any) -> Any:
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).detach()


def _detached_silu(x: Any) -> Any:
    return x * torch.sigmoid(x).detach()


def _detached_mixer(mixer: Any, x: Any) -> Any:
    """A mixer as transformers' slow path goes about it."""
    u, z = mixer.in_proj(x).transpose(1, 2).chunk(2, dim=1)
    time = u.shape[2]
    u = _detached_silu(mixer.conv1d(u)[..., :time])
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    low, B, C = (y.detach() for y in mixer.x_proj(u.transpose(1, 2)).split(sizes, dim=-1))
    dt = torch.nn.functional.softplus(mixer.dt_proj(low)).transpose(1, 2).detach()
    decay = torch.exp(-torch.exp(mixer.A_log)[None, :, None, :] * dt[..., None]).detach()
    enters = (dt[..., None] * B[:, None]).detach() * u[..., None]
    state, outputs = torch.zeros_like(decay[:, :, 0]), []
    for t in range(time):
        state = decay[:, :, t] * state + enters[:, :, t]
        outputs.append((state @ C[:, t, :, None])[..., 0])
    y = torch.stack(outputs, dim=-1) + u * mixer.D[None, :, None]
    gated = y * _detached_silu(z)
    return mixer.out_proj((0.5 * gated + 0.5 * gated.detach()).transpose(1, 2))


ROWS = {make.__name__: make for make in (prefill, training, qwen, decode, relevance)}


def main() -> None:
    """All rows, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROWS", help=f"some of {', '.join(ROWS)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    scanfield.set_num_threads(1)
    told.set_verbosity_error()
    arguments = [*(["--quick"] if asked.quick else []), *(["--only", *asked.only] if asked.only else [])]
    report: dict[str, Any] = {
        "command": " ".join(["python benchmarks/models.py", *arguments]),
        "about": ABOUT,
        "machine": machine() | {"transformers": version("transformers")},
        "rows": [],
    }
    for name in asked.only or ROWS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows: list[Row] = list(ROWS[name](asked.quick))
        # The floors are for the full sizes.
        report["rows"] += [line | {"met": None} for line in rows] if asked.quick else rows
        if asked.output:  # what was measured stays, whatever becomes of the rest
            Path(asked.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if asked.json:
        print(json.dumps(report, indent=2))
    elif not asked.output:
        print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
        print_rows(report["rows"])


if __name__ == "__main__":
    main()
