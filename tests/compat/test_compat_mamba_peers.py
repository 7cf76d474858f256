"""compat.mamba_ssm against mamba's own reference functions on tensors: outputs, states, and autograd's gradients."""

from __future__ import annotations

import ast
import inspect

import pytest
from loading import folder, load_file, load_functions

from scanfield.compat import mamba_ssm as compat
from scanfield.layers import GatedMLP, LanguageModel, MambaBlock

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="mamba's references are PyTorch")
einops = pytest.importorskip("einops", reason="mamba's references use einops")

from alike import close, compare  # noqa: E402  (needs torch)

from scanfield_torch import nn  # noqa: E402

F = torch.nn.functional
INTERFACE = "ops/selective_scan_interface.py"
UPDATE = "ops/triton/selective_state_update.py"
BATCH, T, CHANNELS, STATE, GROUPS, WIDTH = 2, 19, 6, 4, 3, 4


def conv_ref(x, weight, bias=None, activation=None):
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    y = y[..., : x.shape[-1]]
    return y if activation is None else F.silu(y)


def reference(relative, *names, **more):
    surroundings = {"torch": torch, "F": F, "rearrange": einops.rearrange, "repeat": einops.repeat} | more
    return load_functions("mamba_ssm", relative, names, surroundings)[names[0]]


def draw(b="shared", c="shared", extras=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    shapes = {
        "constant": (CHANNELS, STATE),
        "shared": (BATCH, STATE, T),
        "grouped": (BATCH, GROUPS, STATE, T),
    }
    inputs = {
        "u": normal(BATCH, CHANNELS, T),
        "delta": normal(BATCH, CHANNELS, T),
        "A": -torch.rand(CHANNELS, STATE, generator=g) - 0.5,
        "B": normal(*shapes[b]),
        "C": normal(*shapes[c]),
    }
    if extras:
        inputs |= {"D": normal(CHANNELS), "z": normal(BATCH, CHANNELS, T), "delta_bias": normal(CHANNELS)}
    return inputs


@pytest.mark.parametrize("form", ["selective_scan_fn", "selective_scan_ref"])
@pytest.mark.parametrize(
    ("b", "c", "extras"),
    [("shared", "shared", True), ("constant", "grouped", True), ("grouped", "constant", False)],
)
def test_selective_scan(form, b, c, extras):
    theirs = reference(INTERFACE, "selective_scan_ref")
    options = {"delta_softplus": True, "return_last_state": True}
    compare(getattr(compat, form), theirs, draw(b, c, extras) | options)


def test_selective_scan_positional_and_without_last_state():
    theirs = reference(INTERFACE, "selective_scan_ref")
    inputs = list(draw().values())
    close(compat.selective_scan_fn(*inputs, True), theirs(*inputs, True))


def test_complex_selective_scan():
    """Complex A; B and C real with parts in turn along the doubled last axis; B has groups."""
    g = torch.Generator().manual_seed(3)
    inputs = draw() | {
        "A": torch.complex(
            -torch.rand(CHANNELS, STATE, generator=g) - 0.5, torch.randn(CHANNELS, STATE, generator=g)
        ),
        "B": torch.randn(BATCH, GROUPS, STATE, 2 * T, generator=g),
        "C": torch.randn(BATCH, STATE, 2 * T, generator=g),
        "delta_softplus": True,
        "return_last_state": True,
    }
    compare(compat.selective_scan_fn, reference(INTERFACE, "selective_scan_ref"), inputs)


def test_half_precision_keeps_its_dtype():
    theirs = reference(INTERFACE, "selective_scan_ref")
    inputs = {n: x if n in ("A", "D", "delta_bias") else x.bfloat16() for n, x in draw().items()}
    ours, want = (
        compat.selective_scan_fn(**inputs, return_last_state=True),
        theirs(**inputs, return_last_state=True),
    )
    close(ours[0], want[0], 1e-2)
    close(ours[1], want[1])


@pytest.mark.parametrize("case", ["input dependent", "constant B", "complex", "biases", "norms"])
def test_mamba_inner(case):
    g = torch.Generator().manual_seed(4)
    rank, width = 3, 5
    complex_model = case == "complex"
    size = STATE * (2 if complex_model else 1)
    A = -torch.rand(CHANNELS, STATE, generator=g) - 0.5
    inputs = {
        "xz": torch.randn(BATCH, 2 * CHANNELS, T, generator=g),
        "conv1d_weight": torch.randn(CHANNELS, 1, WIDTH, generator=g) / 2,
        "conv1d_bias": torch.randn(CHANNELS, generator=g),
        "x_proj_weight": torch.randn(rank + 2 * size, CHANNELS, generator=g) / 2,
        "delta_proj_weight": torch.randn(CHANNELS, rank, generator=g),
        "out_proj_weight": torch.randn(width, CHANNELS, generator=g),
        "out_proj_bias": torch.randn(width, generator=g),
        "A": torch.complex(A, torch.randn(A.shape, generator=g)) if complex_model else A,
        "D": torch.randn(CHANNELS, generator=g),
        "delta_bias": torch.randn(CHANNELS, generator=g),
    }
    if case == "constant B":
        inputs["B"] = torch.randn(CHANNELS, STATE, generator=g)
    if case == "biases":
        inputs |= {name: torch.randn(STATE, generator=g) for name in ("B_proj_bias", "C_proj_bias")}
    scan = reference(INTERFACE, "selective_scan_ref")
    theirs = reference(INTERFACE, "mamba_inner_ref", selective_scan_fn=scan, causal_conv1d_fn=conv_ref)
    if case == "norms":  # upstream's reference has no norms; they are FalconMamba's, written out
        norms = {"b_rms_weight": STATE, "c_rms_weight": STATE, "dt_rms_weight": CHANNELS}
        inputs |= {name: torch.rand(n, generator=g) + 0.5 for name, n in norms.items()}
        theirs = falcon
    compare(compat.mamba_inner_fn, theirs, inputs, 5e-6)


def falcon(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D, delta_bias,
    b_rms_weight, c_rms_weight, dt_rms_weight,
):  # fmt: skip
    scan = reference(INTERFACE, "selective_scan_ref")
    rank = delta_proj_weight.shape[1]
    x, z = xz.chunk(2, dim=1)
    x = conv_ref(x, conv1d_weight[:, 0], conv1d_bias, "silu")
    dt, B, C = (x_proj_weight @ x).split([rank, STATE, STATE], dim=1)
    dt = delta_proj_weight @ dt

    def norm(v, weight):
        return F.rms_norm(v.transpose(1, 2), v.shape[1:2], weight, 1e-6).transpose(1, 2)

    y = scan(
        x, norm(dt, dt_rms_weight), A, norm(B, b_rms_weight), norm(C, c_rms_weight), D, z, delta_bias, True
    )
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def test_mamba_inner_of_halved_inputs_and_whole_weights():
    """As autocast has them: weights take the dtype of xz, the scan's own parameters keep theirs."""
    g = torch.Generator().manual_seed(7)
    shapes = {
        "xz": (1, 2 * CHANNELS, 5), "conv1d_weight": (CHANNELS, 1, WIDTH), "conv1d_bias": (CHANNELS,),
        "x_proj_weight": (2 + 2 * STATE, CHANNELS), "delta_proj_weight": (CHANNELS, 2), "out_proj_weight": (3, CHANNELS),
        "out_proj_bias": (3,), "A": (CHANNELS, STATE), "D": (CHANNELS,), "delta_bias": (CHANNELS,),
    }  # fmt: skip
    given = {name: torch.randn(shape, generator=g) * 0.5 for name, shape in shapes.items()}
    given["A"] = -given["A"].abs()
    half = compat.mamba_inner_fn(**given | {"xz": given["xz"].bfloat16()})
    assert half.dtype == torch.bfloat16
    want = compat.mamba_inner_fn(**given)
    assert float((half.float() - want).abs().max()) <= 0.03 * float(want.abs().max())


def step_inputs(heads, seed=5, tied=False):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    if not heads:
        inner, b = (CHANNELS,), (BATCH, STATE)
    else:
        inner, b = (4, 3), (BATCH, 2, STATE)
    inputs = {
        "x": normal(BATCH, *inner),
        "dt": normal(BATCH, *inner),
        "A": -torch.rand(*inner, STATE, generator=g),
        "B": normal(*b),
        "C": normal(*b),
        "D": normal(*inner),
        "z": normal(BATCH, *inner),
        "dt_bias": normal(*inner),
    }
    if tied:  # as Mamba-2 passes them: one value a head, expanded
        inputs["dt"] = normal(BATCH, 4)[..., None].expand(BATCH, 4, 3)
        inputs["A"] = -torch.rand(4, generator=g)[:, None, None].expand(4, 3, STATE)
        inputs["D"] = normal(4)[:, None].expand(4, 3)
        inputs["dt_bias"] = normal(4)[:, None].expand(4, 3)
    return normal(BATCH, *inner, STATE), inputs


@pytest.mark.parametrize("kind", ["flat", "heads", "tied"])
@pytest.mark.parametrize("bare", [False, True])
def test_state_update_in_place(kind, bare):
    """Several steps into one strided view of a larger buffer, which is changed there and nowhere else."""
    theirs = reference(UPDATE, "selective_state_update_ref")
    state, _ = step_inputs(kind != "flat")
    buffer = torch.full((*state.shape[:1], 2, *state.shape[1:]), 7.0)
    buffer[:, 1] = state
    want = state.clone()
    for seed in range(3):
        _, inputs = step_inputs(kind != "flat", seed, kind == "tied")
        if bare:
            for name in ("D", "z", "dt_bias"):
                del inputs[name]
        view = buffer[:, 1]
        got = compat.selective_state_update(view, **inputs, dt_softplus=True)
        close(got, theirs(want, **inputs, dt_softplus=True))
        close(buffer[:, 1], want)
        assert torch.equal(buffer[:, 0], torch.full_like(want, 7.0))


@pytest.mark.parametrize("kind", ["flat", "tied"])
def test_state_update_keeps_the_dtype_of_state_and_output(kind):
    state, inputs = step_inputs(kind != "flat", tied=kind == "tied")
    half = {n: x if n in ("A", "dt_bias") else x.bfloat16() for n, x in inputs.items()}
    low = state.bfloat16()
    y = compat.selective_state_update(low, **half)
    wide = state.bfloat16().float()
    want = compat.selective_state_update(wide, **{n: x.float() for n, x in half.items()})
    assert y.dtype == low.dtype == torch.bfloat16
    close(y.float(), want, 1e-2)
    assert torch.equal(low, wide.bfloat16())


def test_state_update_of_a_pool():
    pool_state, inputs = step_inputs(True)
    pool = torch.cat([pool_state, pool_state + 1, pool_state - 1])
    before = pool.clone()
    rows = torch.tensor([4, 1])
    want = pool[rows]
    y = compat.selective_state_update(pool, **inputs, state_batch_indices=rows)
    close(y, compat.selective_state_update(want, **inputs))
    assert torch.equal(pool[rows], want)
    others = [0, 2, 3, 5]
    assert torch.equal(pool[others], before[others])


def chunk_inputs(groups=2, seed=6):
    g = torch.Generator().manual_seed(seed)
    heads, P = 4, 3
    return {
        "x": torch.randn(BATCH, T, heads, P, generator=g),
        "dt": torch.randn(BATCH, T, heads, generator=g),
        "A": -torch.rand(heads, generator=g) - 0.2,
        "B": torch.randn(BATCH, T, groups, STATE, generator=g),
        "C": torch.randn(BATCH, T, groups, STATE, generator=g),
        "D": torch.randn(heads, P, generator=g),
        "z": torch.randn(BATCH, T, heads, P, generator=g),
        "dt_bias": torch.randn(heads, generator=g),
        "initial_states": torch.randn(BATCH, heads, P, STATE, generator=g),
    }


def by_steps(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx=None, limit=(0.0, float("inf"))):
    """The chunked scan token by token with mamba's decoding reference, which knows nothing of chunks."""
    update = reference(UPDATE, "selective_state_update_ref")
    heads, width = x.shape[2:]
    dt = F.softplus(dt + dt_bias).clamp(*limit)
    D = D if D.ndim == 2 else D[:, None].expand(heads, width)
    state, ys = initial_states, []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        holder = Holder(state)
        wide = A[:, None, None].expand(heads, width, STATE)
        y = update(
            holder, x[:, t], dt[:, t, :, None].expand(-1, heads, width), wide, B[:, t], C[:, t], D, z[:, t]
        )
        state = holder.state
        ys.append(y)
    return torch.stack(ys, dim=1), state


class Holder:
    """A state that the reference may "copy into" without cutting autograd's graph."""

    def __init__(self, state):
        self.state = state
        self.shape = state.shape

    def dim(self):
        return self.state.dim()

    def __mul__(self, other):
        return self.state * other

    def copy_(self, value):
        self.state = value

    def to(self, dtype):
        return self.state.to(dtype)


@pytest.mark.parametrize("case", ["plain", "limits", "seq_idx"])
def test_chunk_scan(case):
    limit = (0.3, 1.0) if case == "limits" else (0.0, float("inf"))
    seq_idx = None
    if case == "seq_idx":
        seq_idx = torch.tensor([[0] * 7 + [1] * 12, [3] * 1 + [4] * 8 + [5] * 10])
    inputs = chunk_inputs()
    if case == "limits":
        inputs["D"] = inputs["D"][:, 0].clone()

    def ours(**given):
        return compat.mamba_chunk_scan_combined(
            **given, chunk_size=8, seq_idx=seq_idx, dt_softplus=True, dt_limit=limit, return_final_states=True
        )

    compare(ours, lambda **given: by_steps(**given, seq_idx=seq_idx, limit=limit), inputs, 5e-6)


def test_chunk_scan_returns_what_was_asked_for():
    """cu_seqlens separates sequences; the states come one a sequence, and the last one as the final state."""
    inputs = {n: x[:1] if n not in ("A", "D", "dt_bias") else x for n, x in chunk_inputs().items()}
    bounds = torch.tensor([0, 5, 5, 19])
    del inputs["initial_states"]
    call = compat.mamba_chunk_scan_combined
    both = {"return_final_states": True, "return_varlen_states": True}
    y, last, each = call(**inputs, chunk_size=8, cu_seqlens=bounds, **both)
    assert last.shape == (1, 4, 3, STATE) and each.shape == (3, 4, 3, STATE)
    assert torch.equal(last[0], each[2]) and not each[1].any()
    sequences = ("x", "dt", "B", "C", "z")
    for number, (start, stop) in {0: (0, 5), 2: (5, 19)}.items():
        alone = {n: x[:, start:stop] if n in sequences else x for n, x in inputs.items()}
        want, state = call(**alone, chunk_size=8, return_final_states=True)
        close(y[:, start:stop], want)
        close(each[number : number + 1], state)
    seq_idx = torch.tensor([[0] * 5 + [2] * 14])
    assert torch.equal(call(**inputs, chunk_size=8, cu_seqlens=bounds, seq_idx=seq_idx), y)
    assert torch.equal(call(**inputs, chunk_size=4, seq_idx=seq_idx), y)
    assert len(call(**inputs, chunk_size=8, cu_seqlens=bounds, return_varlen_states=True)) == 2
    low = call(**inputs, chunk_size=8, return_final_states=True, state_dtype=torch.bfloat16)[1]
    assert low.dtype == torch.bfloat16


def split_inputs(D, groups, width=5):
    g = torch.Generator().manual_seed(9)
    heads, P = 4, 3
    channels = heads * P
    mixed = channels + 2 * groups * STATE
    shapes = {
        "zxbcdt": (BATCH, T, channels + mixed + heads), "conv1d_weight": (mixed, WIDTH), "conv1d_bias": (mixed,),
        "dt_bias": (heads,), "A": (heads,), "D": (heads, P)[:D], "rmsnorm_weight": (channels,),
        "outproj_weight": (width, channels), "outproj_bias": (width,),
    }  # fmt: skip
    inputs = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return inputs | {"A": -inputs["A"].abs() - 0.2}


@pytest.mark.parametrize("case", ["norm last", "norm first", "gate alone"])
def test_split_convolution_and_scan(case):
    """Mamba's reference, its scan token by token; D a head or a channel."""
    inputs = split_inputs(D=1 if case == "norm first" else 2, groups=2 if case == "gate alone" else 1)
    options = {
        "chunk_size": 8,
        "norm_before_gate": case == "norm first",
        "dt_limit": (0.1, 2.0),
        "rmsnorm_eps": 1e-4,
    }
    options |= {"headdim": 3, "ngroups": 2 if case == "gate alone" else 1}
    if case == "gate alone":
        del inputs["rmsnorm_weight"], inputs["outproj_weight"], inputs["outproj_bias"]

    def scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit):
        B, C = (a.repeat_interleave(4 // a.shape[2], dim=2) for a in (B, C))
        state = torch.zeros(BATCH, 4, 3, STATE)
        z, gated = (torch.ones_like(x), False) if z is None else (z, True)
        y, _ = by_steps(x, dt, A, B, C, D, z, dt_bias, state, limit=dt_limit)
        return y if gated else y / F.silu(torch.ones(()))

    norm = reference("ops/triton/layernorm_gated.py", "rms_norm_ref")
    theirs = reference(
        "ops/triton/ssd_combined.py", "mamba_split_conv1d_scan_ref", ssd_selective_scan=scan, rmsnorm_fn=norm,
        causal_conv1d_fn=conv_ref,
    )  # fmt: skip
    compare(
        lambda **given: compat.mamba_split_conv1d_scan_combined(**given, **options),
        lambda **given: theirs(**given, **options),
        inputs,
        1e-5,
    )


def test_split_convolution_and_scan_is_the_inside_of_a_block():
    """Groups in the norm, an MLP beside, sequences in a row and states: against the layer, and against its parts."""
    from scanfield.layers import Mamba2Block

    block = Mamba2Block(6, STATE, head_dim=3, groups=2, dt_limit=(0.1, 2.0)).init(0, torch, dtype="float64")
    p = block.named_parameters()
    x = torch.randn(BATCH, T, 6, dtype=torch.float64)
    want = block(x)

    def call(projected, **more):
        return compat.mamba_split_conv1d_scan_combined(
            projected, p["conv1d.weight"][:, 0], p["conv1d.bias"], p["dt_bias"], -p["A_log"].exp(), p["D"], 8,
            rmsnorm_weight=p["norm.weight"], rmsnorm_eps=1e-5, headdim=3, ngroups=2, norm_before_gate=False,
            dt_limit=(0.1, 2.0), **more,
        )  # fmt: skip

    inside = x @ p["in_proj.weight"].T
    y, state = call(inside, return_final_states=True, outproj_weight=p["out_proj.weight"])
    close(y, want.output)
    close(state, want.state["ssm"])
    seq_idx = torch.tensor([[0] * 7 + [1] * 12] * BATCH)
    apart = call(inside, seq_idx=seq_idx)
    close(apart[:, 7:], call(inside[:, 7:]))
    beside = torch.randn(BATCH, T, 10, dtype=torch.float64)
    both = call(torch.cat([beside, inside], dim=-1))
    close(both[..., 5:], call(inside))
    close(both[..., :5], F.silu(beside[..., :5]) * beside[..., 5:])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_convolution(activation):
    g = torch.Generator().manual_seed(8)
    inputs = {
        "x": torch.randn(BATCH, CHANNELS, T, generator=g),
        "weight": torch.randn(CHANNELS, WIDTH, generator=g),
        "bias": torch.randn(CHANNELS, generator=g),
    }
    compare(
        lambda **given: compat.causal_conv1d_fn(**given, activation=activation),
        lambda **given: conv_ref(**given, activation=activation),
        inputs,
    )


@pytest.mark.parametrize("continued", [True, False])
def test_ssd_minimal_discrete(continued):
    """Listing 1 of the paper, whose blocks must divide the time; ours take any."""
    listing = "modules/ssd_minimal.py"
    segsum = reference(listing, "segsum")
    theirs = reference(listing, "ssd_minimal_discrete", segsum=segsum)
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    inputs = {
        "X": normal(2, 12, 3, 5),
        "A": -normal(2, 12, 3).abs(),
        "B": normal(2, 12, 3, 4),
        "C": normal(2, 12, 3, 4),
    }
    if continued:
        inputs["initial_states"] = normal(2, 1, 3, 5, 4)
    compare(
        lambda **given: compat.ssd_minimal_discrete(**given, block_len=5),
        lambda **given: theirs(**given, block_len=4),
        inputs,
        1e-12,
    )


def test_a_block_with_an_mlp_is_upstreams():
    """The state dict of mamba_ssm's GatedMLP, which rounds its size up; the residual branches one after the other."""
    torch.manual_seed(0)
    peer = load_file("mamba_ssm", "modules/mlp.py").GatedMLP(8, 100)
    hidden = peer.fc2.weight.shape[1]
    assert hidden == 128
    model = nn.LanguageModel(
        11, 8, [MambaBlock(8, 4)], mlps=[nn.GatedMLP(8, hidden)], names="mamba_ssm", scheme="mamba_ssm"
    )
    block, x = model.backbone.layers[0], torch.randn(2, 7, 8)
    block.mlp.load_state_dict(peer.state_dict())
    with torch.no_grad():
        between = x + block.mixer(block.norm(x)).output
        want = between + peer(block.norm2(between))
        close(block(x).output, want)
    # Two terms of the residual stream, by whose number this scheme divides, instead of one.
    one = LanguageModel(11, 8, [MambaBlock(8, 4)]).init(3, torch, scheme="mamba_ssm")
    two = LanguageModel(11, 8, [MambaBlock(8, 4)], mlps=[GatedMLP(8, hidden)]).init(
        3, torch, scheme="mamba_ssm"
    )
    first, second = (m.named_parameters()["layers.0.mixer.out_proj.weight"] for m in (one, two))
    close(second * 2**0.5, first)


UPSTREAM = {
    "selective_scan_fn": INTERFACE,
    "selective_scan_ref": INTERFACE,
    "mamba_inner_fn": INTERFACE,
    "selective_state_update": UPDATE,
    "mamba_chunk_scan_combined": "ops/triton/ssd_combined.py",
    "mamba_split_conv1d_scan_combined": "ops/triton/ssd_combined.py",
    "ssd_minimal_discrete": "modules/ssd_minimal.py",
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_signature_is_upstreams(name):
    """Names, order and defaults as in the installed source; what is ours comes behind, with a default."""
    tree = ast.parse((folder("mamba_ssm") / UPSTREAM[name]).read_text(encoding="utf-8"))
    (node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    names = [argument.arg for argument in node.args.args]
    defaults = [eval(ast.unparse(d), {"float": float}) for d in node.args.defaults]  # noqa: S307  (literals)
    ours = list(inspect.signature(getattr(compat, name)).parameters.values())
    assert [p.name for p in ours[: len(names)]] == names
    needed = len(names) - len(defaults)
    assert all(p.default is p.empty for p in ours[:needed])
    assert [p.default for p in ours[needed : len(names)]] == defaults
    assert all(p.default is not p.empty for p in ours[len(names) :])
