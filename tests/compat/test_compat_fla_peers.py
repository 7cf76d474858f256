"""compat.fla against flash-linear-attention's own naive functions on tensors: outputs, states, autograd's gradients."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
from loading import folder, load_file, load_functions

import scanfield
from scanfield.compat import fla as compat

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="flash-linear-attention's naive functions are PyTorch")
pytest.importorskip("einops", reason="flash-linear-attention's naive files import einops")

from alike import close, compare  # noqa: E402  (needs torch)

B, T, H, K, V = 2, 13, 2, 5, 3
FINAL = {"output_final_state": True}


def draw(seed=0, heads=H, vheads=H, decay=1.0):
    r = np.random.default_rng(seed)
    key = r.standard_normal((B, T, heads, K))
    drawn = {
        "q": r.standard_normal((B, T, heads, K)),
        "k": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "v": r.standard_normal((B, T, vheads, V)),
        "g": r.uniform(-decay, -0.01, (B, T, vheads, K)),
        "b": r.uniform(0, 1, (B, T, vheads, K)),
        "w": r.uniform(0, 1, (B, T, vheads, V)),
        "beta": r.uniform(0, 1, (B, T, vheads)),
        "head": r.uniform(-decay, -0.01, (B, T, vheads)),
        "p": r.standard_normal((B, T, heads, K)) / np.sqrt(K),
        "initial_state": r.standard_normal((B, vheads, K, V)),
    }
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in drawn.items()}


def pick(drawn, *names, **renamed):
    return {n: drawn[n] for n in names} | {ours: drawn[theirs] for ours, theirs in renamed.items()}


def naive(file, name):
    return getattr(load_file("fla", f"ops/{file}/naive.py"), name)


def heads_first(function, *names):
    """A function of (batch, heads, time, ...) as one of (batch, time, heads, ...)."""

    def call(initial_state=None, **given):
        o, state = function(*(given[n].transpose(1, 2) for n in names), initial_state=initial_state)
        return o.transpose(1, 2), state

    return call


QKV = ("q", "k", "v")
# rule -> (function of theirs that takes our keywords, inputs)
RULES = {
    "gdn2": (
        lambda: naive("gdn2", "naive_recurrent_gdn2"),
        pick(draw(1), *QKV, "g", "b", "w", "initial_state"),
    ),
    "kda": (lambda: naive("kda", "naive_recurrent_kda"), pick(draw(2), *QKV, "g", "beta", "initial_state")),
    "gated_delta_rule": (
        lambda: naive("gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        pick(draw(3), *QKV, "beta", "initial_state", g="head"),
    ),
    "delta_rule": (
        lambda: heads_first(naive("delta_rule", "delta_rule_recurrence"), *QKV, "beta"),
        pick(draw(4), *QKV, "beta", "initial_state"),
    ),
    "comba": (
        lambda: naive("comba", "naive_recurrent_comba"),
        pick(draw(5), *QKV, "p", "beta", "initial_state", g="head"),
    ),
    "simple_gla": (
        lambda: naive("simple_gla", "naive_recurrent_simple_gla"),
        pick(draw(6), *QKV, "initial_state", g="head"),
    ),
    "linear_attn": (
        lambda: naive("linear_attn", "naive_recurrent_linear_attn"),
        pick(draw(7), *QKV, "initial_state"),
    ),
}


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule, form):
    theirs, inputs = RULES[rule]
    theirs, more = theirs(), {} if rule == "delta_rule" else FINAL
    options = {"normalize": False} if rule == "linear_attn" else {}
    ours = getattr(compat, f"{form}_{rule}")
    compare(lambda **x: ours(**x, **FINAL, **options), lambda **x: theirs(**x, **more), inputs, 5e-6)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_gla(form):
    """The decay of key channels is g in one form and gk in the other."""
    name = {"chunk": "g", "fused_recurrent": "gk"}[form]
    ours = getattr(compat, f"{form}_gla")
    theirs = naive("gla", "naive_recurrent_gla")
    inputs = pick(draw(8), *QKV, "g", "initial_state")

    def call(g, **x):
        return ours(**x, **{name: g}, **FINAL)

    compare(call, lambda g, **x: theirs(**x, gk=g, **FINAL), inputs, 5e-6)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_retention(form):
    q, k, v = (draw(9)[n] for n in QKV)
    theirs = naive("retention", "naive_retention")(*(x.transpose(1, 2) for x in (q, k, v)))
    close(getattr(compat, f"{form}_retention")(q, k, v)[0], theirs.transpose(1, 2))


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_normalised_linear_attention(form):
    """Positive queries and keys, as its feature maps make them; the sum of keys goes in and comes out beside the state."""
    drawn = draw(10)
    inputs = {"q": drawn["q"].abs(), "k": drawn["k"].abs(), "v": drawn["v"]}
    state = (drawn["initial_state"], drawn["k"][:, :1].abs())
    ours, theirs = getattr(compat, f"{form}_linear_attn"), naive("linear_attn", "naive_recurrent_linear_attn")

    def flat(function):
        def call(**x):
            o, (s, z) = function(**x, initial_state=state, normalize=True, **FINAL)
            return o, s, z

        return call

    compare(flat(ours), flat(theirs), inputs, 5e-6)
    o, (s, z) = ours(**inputs, normalize=True)
    assert s is None and z.shape == (B, 1, H, K)
    close(o, theirs(**inputs, normalize=True)[0])


@pytest.mark.parametrize("gated", [True, False])
def test_gated_delta_product(gated):
    r = np.random.default_rng(11)
    n = 3
    inputs = {
        "q": r.standard_normal((B, T, H, K)),
        "k": r.standard_normal((B, T * n, H, K)) / np.sqrt(K),
        "v": r.standard_normal((B, T * n, H, V)),
        "beta": r.uniform(0, 1, (B, T * n, H)),
        "initial_state": r.standard_normal((B, H, K, V)),
    }
    inputs = {name: torch.tensor(x, dtype=torch.float32) for name, x in inputs.items()}
    if gated:
        inputs["g"] = torch.tensor(r.uniform(-1, 0, (B, T, H)), dtype=torch.float32)
    gate = {} if gated else {"g": None}
    theirs = naive("gated_delta_product", "naive_recurrent_gated_delta_product")
    compare(
        lambda **x: compat.chunk_gated_delta_product(**x, **gate, num_householder=n, **FINAL),
        lambda **x: theirs(**x, **gate, scale=K**-0.5, num_householder=n, **FINAL),
        inputs,
        5e-6,
    )
    packed = {m: x[:1] if m != "initial_state" else x for m, x in inputs.items()}
    bounds = torch.tensor([0, 4, T])
    o, state = compat.chunk_gated_delta_product(
        **packed, **gate, num_householder=n, cu_seqlens=bounds, **FINAL
    )
    want = theirs(**packed, **gate, scale=K**-0.5, num_householder=n, cu_seqlens=bounds, **FINAL)
    close(o, want[0], 5e-6)
    close(state, want[1], 5e-6)


def test_strength_and_decay_of_value_channels():
    """beta for each value channel against theirs; gv, which no naive function has, as heads of one value channel."""
    inputs = pick(draw(12), *QKV, "initial_state", beta="w")
    theirs = heads_first(naive("delta_rule", "delta_rule_recurrence"), *QKV, "beta")
    compare(lambda **x: compat.fused_recurrent_delta_rule(**x, **FINAL), theirs, inputs, 5e-6)

    drawn = draw(13)
    gv = -drawn["w"]
    recurrent = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    o, state = compat.fused_recurrent_gated_delta_rule(
        *(drawn[n] for n in QKV),
        drawn["head"],
        gv=gv,
        beta=drawn["beta"],
        initial_state=drawn["initial_state"],
        **FINAL,
    )
    for c in range(V):
        one = {"v": drawn["v"][..., c : c + 1], "initial_state": drawn["initial_state"][..., c : c + 1]}
        want = recurrent(
            drawn["q"], drawn["k"], beta=drawn["beta"], g=drawn["head"] + gv[..., c], **one, **FINAL
        )
        close(o[..., c : c + 1], want[0], 5e-6)
        close(state[..., c : c + 1], want[1], 5e-6)


@pytest.mark.parametrize("decays", ["gk and gv", "g, gk and gv"])
def test_all_decays_together(decays):
    """The state decays by channel of key and of value at once: exp(gk_k + gv_v [+ g])."""
    d = draw(14)
    gk, gv, g = d["g"], -d["w"], d["head"] if decays == "g, gk and gv" else None
    head = {} if g is None else {"g": g}
    o, state = compat.fused_recurrent_gated_delta_rule(
        d["q"], d["k"], d["v"], **head, gk=gk, gv=gv, beta=d["beta"], scale=1.0, **FINAL
    )
    S = torch.zeros(B, H, K, V)
    for t in range(T):
        total = gk[:, t, :, :, None] + gv[:, t, :, None, :] + (0 if g is None else g[:, t, :, None, None])
        S = S * total.exp()
        seen = torch.einsum("bhk,bhkv->bhv", d["k"][:, t], S)
        S = S + d["k"][:, t, :, :, None] * (d["beta"][:, t, :, None] * (d["v"][:, t] - seen))[:, :, None, :]
        close(o[:, t], torch.einsum("bhk,bhkv->bhv", d["q"][:, t], S), 1e-5)
    close(state, S, 1e-5)


def gates(lower_bound, with_rate=True, seed=15):
    r = np.random.default_rng(seed)
    raw = torch.tensor(r.standard_normal((B, T, H, K)), dtype=torch.float32)
    bias = torch.tensor(r.standard_normal(H * K), dtype=torch.float32)
    rate = torch.tensor(np.log(r.uniform(1, 4, H)), dtype=torch.float32) if with_rate else None
    names = ("naive_kda_gate", "naive_kda_lowerbound_gate")
    surroundings = {"torch": torch, "F": torch.nn.functional}
    functions = load_functions("fla", "ops/kda/gate.py", names, surroundings)
    if lower_bound is None:
        return raw, rate, bias, functions[names[0]](raw, rate, bias)
    return raw, rate, bias, functions[names[1]](raw, rate, bias, lower_bound)


@pytest.mark.parametrize("rule", ["gdn2", "kda"])
@pytest.mark.parametrize(("lower_bound", "with_rate"), [(None, True), (-5.0, True), (-3.0, False)])
def test_gate_in_kernel_of_channels(rule, lower_bound, with_rate):
    raw, rate, bias, decay = gates(lower_bound, with_rate)
    d = draw(16)
    rest = (d["b"], d["w"]) if rule == "gdn2" else (d["beta"],)
    parameters = {"A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True, "lower_bound": lower_bound}
    chunk, recurrent = (getattr(compat, f"{form}_{rule}") for form in ("chunk", "fused_recurrent"))
    want = chunk(d["q"], d["k"], d["v"], decay, *rest)[0]
    safe = {"safe_gate": True} if lower_bound is not None else {}
    close(chunk(d["q"], d["k"], d["v"], raw, *rest, **parameters, **safe)[0], want)
    close(recurrent(d["q"], d["k"], d["v"], raw, *rest, **parameters)[0], want)


def test_gate_in_kernel_of_heads():
    names = ("naive_gdn_gate",)
    gate = load_functions(
        "fla", "ops/gated_delta_rule/gate.py", names, {"torch": torch, "F": torch.nn.functional}
    )
    d = draw(17, vheads=2 * H)
    raw, rate, bias = 3 * d["head"], torch.tensor([0.5, 0.1, -1.0, 0.3]), torch.tensor([0.2, -0.3, 1.0, 0.0])
    decay = gate[names[0]](raw, rate, bias)
    want = compat.chunk_gated_delta_rule(d["q"], d["k"], d["v"], decay, d["beta"])[0]
    parameters = {"A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True}
    close(compat.chunk_gated_delta_rule(d["q"], d["k"], d["v"], raw, d["beta"], **parameters)[0], want)
    ours = compat.fused_recurrent_gated_delta_rule(d["q"], d["k"], d["v"], raw, beta=d["beta"], **parameters)[
        0
    ]
    close(ours, want)


@pytest.mark.parametrize("double", [False, True])
def test_beta_in_kernel(double):
    d = draw(18)
    logits = 4 * d["beta"] - 2
    beta = torch.sigmoid(logits) * (2 if double else 1)
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": double}
    for call, g in ((compat.chunk_kda, d["g"]), (compat.chunk_gated_delta_rule, d["head"])):
        close(call(d["q"], d["k"], d["v"], g, logits, **options)[0], call(d["q"], d["k"], d["v"], g, beta)[0])


def test_comba_normalises_the_erase_key_too():
    d = draw(19)
    unit = {n: d[n] / (d[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in ("q", "k", "p")}
    theirs = naive("comba", "naive_recurrent_comba")(
        unit["q"], unit["k"], d["v"], unit["p"], d["beta"], d["head"], **FINAL
    )
    normalise = {"use_qk_l2norm_in_kernel": True, **FINAL}
    chunk = compat.chunk_comba(d["q"], d["k"], d["v"], d["p"], d["head"], d["beta"], **normalise)
    recurrent = compat.fused_recurrent_comba(
        d["q"], d["k"], d["p"], d["v"], d["head"], d["beta"], **normalise
    )
    for found in (chunk, recurrent):
        close(found[0], theirs[0], 5e-6)
        close(found[1], theirs[1], 5e-6)
    no_p = compat.chunk_comba(d["q"], d["k"], d["v"], None, d["head"], d["beta"])[0]
    close(no_p, compat.chunk_gated_delta_rule(d["q"], d["k"], d["v"], d["head"], d["beta"])[0])


def test_half_precision_keeps_its_dtype():
    """Inputs in bfloat16, the decay in float32 as models pass it; the state in float32."""
    d = draw(20)
    half = {n: d[n].bfloat16() for n in (*QKV, "beta")}
    o, state = compat.chunk_gated_delta_rule(**half, g=d["head"], **FINAL)
    want = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")(
        **{n: x.float() for n, x in half.items()}, g=d["head"], **FINAL
    )
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    close(o.float(), want[0], 1e-2)
    close(state, want[1], 5e-6)


def test_one_graph():
    """torch.compile without a break, also where heads decay by constants."""
    given = pick(draw(9), *QKV, "initial_state")
    compiled = torch.compile(compat.chunk_retention, fullgraph=True, backend="eager")
    for ours, theirs in zip(
        compiled(**given, output_final_state=True),
        compat.chunk_retention(**given, output_final_state=True),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_states_between_chunks():
    """Those at the starts of chunks of each sequence, in both layouts."""
    d = {n: torch.cat(list(x), dim=0)[None] for n, x in draw(21).items() if n != "initial_state"}
    bounds = [0, 5, 2 * T]
    inputs = [d[n] for n in (*QKV, "g", "b", "w")]
    options = {"cu_seqlens": torch.tensor(bounds), "return_intermediate_states": True, "chunk_size": 8}
    _, state, h = compat.chunk_gdn2(*inputs, **options, **FINAL)
    assert h.shape == (1, 1 + 3, H, K, V) and not h[:, :2].any()
    cut = compat.chunk_gdn2(*(x[:, 5:13] for x in inputs), **FINAL)[1]
    close(h[:, 2], cut)
    _, turned, rows = compat.chunk_gdn2(*inputs, **options, **FINAL, state_v_first=True)
    assert torch.equal(turned, state.mT) and torch.equal(rows, h.mT)


def test_bounded_gate_trains_where_its_rate_overflows():
    """exp(100) is infinite in float32, and the slope of the sigmoid 0: their product must not be NaN."""
    ones = {n: torch.ones(1, 4, 1, 2).requires_grad_() for n in QKV}
    beta = torch.full((1, 4, 1), 0.5).requires_grad_()
    raw = torch.tensor([50.0, -50.0]).expand(1, 4, 1, 2).clone().requires_grad_()
    rate, bias = torch.tensor([100.0]).requires_grad_(), torch.zeros(2).requires_grad_()
    o, _ = compat.chunk_kda(
        **ones, g=raw, beta=beta, use_gate_in_kernel=True, lower_bound=-5.0, A_log=rate, dt_bias=bias
    )
    o.sum().backward()
    found = {n: x.grad.clone() for n, x in (ones | {"beta": beta}).items()}
    for x in (raw, rate, bias):
        assert not x.grad.any() and x.grad.isfinite().all()
    for x in (*ones.values(), beta):
        x.grad = None
    decay = torch.tensor([-5.0, 0.0]).expand(1, 4, 1, 2)
    want = scanfield.kda(ones["q"], ones["k"], ones["v"], decay, beta).output
    close(o.detach(), want.detach(), 1e-6)
    want.sum().backward()
    for n, x in (ones | {"beta": beta}).items():
        close(found[n], x.grad, 1e-6)


FILES = {
    "chunk_gdn2": "gdn2/chunk", "fused_recurrent_gdn2": "gdn2/fused_recurrent", "chunk_kda": "kda/chunk",
    "fused_recurrent_kda": "kda/fused_recurrent", "chunk_gated_delta_rule": "gated_delta_rule/chunk",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule/fused_recurrent", "chunk_delta_rule": "delta_rule/chunk",
    "fused_recurrent_delta_rule": "delta_rule/fused_recurrent", "chunk_gla": "gla/chunk",
    "fused_recurrent_gla": "gla/fused_recurrent", "chunk_simple_gla": "simple_gla/chunk",
    "fused_recurrent_simple_gla": "simple_gla/fused_recurrent", "chunk_retention": "retention/chunk",
    "fused_recurrent_retention": "retention/fused_recurrent", "chunk_linear_attn": "linear_attn/chunk",
    "fused_recurrent_linear_attn": "linear_attn/fused_recurrent", "chunk_comba": "comba/chunk",
    "fused_recurrent_comba": "comba/fused_recurrent", "chunk_gated_delta_product": "gated_delta_product/chunk",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_signature_is_upstreams(name):
    """Names, order, defaults and whether further keywords are taken, as in the installed source."""
    tree = ast.parse((folder("fla") / "ops" / f"{FILES[name]}.py").read_text(encoding="utf-8"))
    (node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    defaults = [ast.literal_eval(d) for d in node.args.defaults]
    wanted = [argument.arg for argument in node.args.args]
    ours = list(inspect.signature(getattr(compat, name)).parameters.values())
    more = [p for p in ours if p.kind is p.VAR_KEYWORD]
    assert bool(more) == (node.args.kwarg is not None)
    ours = [p for p in ours if p not in more]
    assert [p.name for p in ours] == wanted
    assert [p.default for p in ours if p.default is not p.empty] == defaults
