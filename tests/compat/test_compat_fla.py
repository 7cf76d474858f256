"""compat.fla on arrays of every library: conventions of states and packs, the traps of its argument orders, refusals."""

from __future__ import annotations

import inspect

import arrays
import numpy as np
import pytest

import scanfield
from scanfield.compat import fla as compat

B, T, H, VH, K, V = 2, 5, 2, 4, 3, 2
ALONE = ("gla", "simple_gla", "retention", "linear_attn")  # value heads are the heads


def leave_out(backend, test, given):
    """On JAX every shape compiles; two rules, one with value channels apart, stand for the others."""
    return backend == "jax" and given.get("name", "chunk_kda") not in ("chunk_kda", "fused_recurrent_gla")


def draw(seed=0, batch=B, time=T, vheads=VH):
    r = np.random.default_rng(seed)
    return {
        "q": r.standard_normal((batch, time, H, K)),
        "k": r.standard_normal((batch, time, H, K)) / np.sqrt(K),
        "v": r.standard_normal((batch, time, vheads, V)),
        "g": r.uniform(-1, -0.01, (batch, time, vheads, K)),
        "b": r.uniform(0, 1, (batch, time, vheads, K)),
        "w": r.uniform(0, 1, (batch, time, vheads, V)),
        "beta": r.uniform(0, 1, (batch, time, vheads)),
        "head": r.uniform(-1, -0.01, (batch, time, vheads)),
        "p": r.standard_normal((batch, time, H, K)) / np.sqrt(K),
        "gamma": r.uniform(-1, -0.01, vheads),
        "initial_state": r.standard_normal((batch, vheads, K, V)),
    }


# function -> its arguments by the names of `draw`, and more
CALLS = {
    "chunk_gdn2": ({"g": "g", "b": "b", "w": "w"}, {"use_qk_l2norm_in_kernel": True}),
    "fused_recurrent_gdn2": ({"g": "g", "b": "b", "w": "w"}, {}),
    "chunk_kda": ({"g": "g", "beta": "beta"}, {"chunk_size": 2}),
    "fused_recurrent_kda": ({"g": "g", "beta": "beta"}, {"use_beta_sigmoid_in_kernel": True}),
    "chunk_gated_delta_rule": ({"g": "head", "beta": "beta"}, {"scale": 0.5}),
    "fused_recurrent_gated_delta_rule": ({"g": "head", "gk": "g", "beta": "beta"}, {}),
    "chunk_delta_rule": ({"beta": "beta"}, {}),
    "fused_recurrent_delta_rule": ({"beta": "w"}, {}),
    "chunk_gla": ({"g": "g"}, {}),
    "fused_recurrent_gla": ({"gk": "g", "gv": "w"}, {"reverse": True}),
    "chunk_simple_gla": ({"g": "head", "g_gamma": "gamma"}, {}),
    "fused_recurrent_simple_gla": ({"g_gamma": "gamma"}, {"reverse": True}),
    "chunk_retention": ({}, {}),
    "fused_recurrent_retention": ({}, {"reverse": True}),
    "chunk_linear_attn": ({}, {"normalize": False}),
    "fused_recurrent_linear_attn": ({}, {}),
    "chunk_comba": ({"p": "p", "g": "head", "beta": "beta"}, {"use_qk_l2norm_in_kernel": True}),
    "fused_recurrent_comba": ({"p": "p", "g": "head"}, {}),
}


def equals(name, drawn):
    """What the call means, in scanfield's own words, in NumPy float64."""
    q, k, v, g, b, w, beta, head, p, gamma, s = drawn.values()
    two = {"initial_state": s}
    unit = p / np.sqrt((p * p).sum(-1, keepdims=True) + 1e-6)
    columns = (v.reshape(B, -1, v.shape[2] * V, 1), s.swapaxes(2, 3).reshape(B, -1, K, 1))

    def joined(result):
        o, last = result
        return o.reshape(v.shape), last.reshape(B, -1, V, K).swapaxes(2, 3)

    each = w.reshape(B, -1, v.shape[2] * V)
    both = (g[..., None, :] + w[..., None]).reshape(B, -1, v.shape[2] * V, K)

    beta_sigmoid = 1 / (1 + np.exp(-beta))
    meaning = {
        "chunk_gdn2": lambda: scanfield.gdn2(q, k, v, g, b, w, **two, qk_l2norm=True),
        "fused_recurrent_gdn2": lambda: scanfield.gdn2(q, k, v, g, b, w, **two),
        "chunk_kda": lambda: scanfield.kda(q, k, v, g, beta, **two),
        "fused_recurrent_kda": lambda: scanfield.kda(q, k, v, g, beta_sigmoid, **two),
        "chunk_gated_delta_rule": lambda: scanfield.gated_delta_rule(q, k, v, head, beta, **two, scale=0.5),
        "fused_recurrent_gated_delta_rule": lambda: scanfield.kda(q, k, v, g + head[..., None], beta, **two),
        "chunk_delta_rule": lambda: scanfield.delta_rule(q, k, v, beta, **two),
        "fused_recurrent_delta_rule": lambda: joined(scanfield.gdn2(q, k, columns[0], None, each, each, columns[1])),
        "chunk_gla": lambda: scanfield.gla(q, k, v, g, **two),
        "fused_recurrent_gla": lambda: joined(scanfield.gla(q, k, columns[0], both, columns[1], reverse=True)),
        "chunk_simple_gla": lambda: scanfield.retention(q, k, v, head + gamma, **two),
        "fused_recurrent_simple_gla": lambda: scanfield.retention(q, k, v, gamma, **two, reverse=True),
        "chunk_retention": lambda: scanfield.retention(q, k, v, **two),
        "fused_recurrent_retention": lambda: scanfield.retention(q, k, v, **two, reverse=True),
        "chunk_linear_attn": lambda: scanfield.linear_attention(q, k, v, **two),
        "fused_recurrent_linear_attn": lambda: scanfield.linear_attention(q, k, v, **two),
        "chunk_comba": lambda: scanfield.comba(q, k, v, unit, head, beta, **two, qk_l2norm=True),
        "fused_recurrent_comba": lambda: scanfield.comba(q, k, v, p, head, np.ones_like(beta), **two),
    }  # fmt: skip
    return meaning[name]()


def heads_of(name):
    return H if name.split("_", 1)[1].removeprefix("recurrent_") in ALONE else VH


@pytest.mark.parametrize("name", CALLS)
def test_call_means_the_operation(library, name):
    drawn = draw(time=library.time(T), vheads=heads_of(name))
    gates, options = CALLS[name]
    given = {n: drawn[n] for n in ("q", "k", "v", "initial_state")} | {n: drawn[x] for n, x in gates.items()}
    o, state = getattr(compat, name)(**library.arrays(given), **options, output_final_state=True)
    want = equals(name, drawn)
    for found, expected in zip((o, state), want, strict=True):
        assert library.is_array(found) and library.on_device(found)
        assert arrays.deviation(library.numpy(found), expected) <= 1e-12


STATE_FIRST = ("chunk_gdn2", "fused_recurrent_kda", "chunk_gated_delta_rule", "chunk_gla", "fused_recurrent_gla",
               "chunk_simple_gla", "fused_recurrent_retention")  # fmt: skip


@pytest.mark.parametrize("name", STATE_FIRST)
def test_state_layout_and_absent_state(name):
    drawn = draw(1, vheads=heads_of(name))
    gates, options = CALLS[name]
    given = {n: drawn[n] for n in ("q", "k", "v")} | {n: drawn[x] for n, x in gates.items()} | options
    call = getattr(compat, name)
    state = drawn["initial_state"]
    o, last = call(**given, initial_state=state, output_final_state=True)
    turned, swapped = call(
        **given, initial_state=state.swapaxes(2, 3), output_final_state=True, state_v_first=True
    )
    assert np.array_equal(o, turned) and np.array_equal(last, swapped.swapaxes(2, 3))
    assert call(**given)[1] is None
    with pytest.raises(scanfield.ShapeError, match="initial_state"):
        call(**given, initial_state=state.swapaxes(2, 3))


@pytest.mark.parametrize("name", CALLS)
def test_packed_sequences_do_not_meet(name):
    """Two sequences of one row against each alone, states by row, in float64."""
    drawn = draw(2, batch=1, time=7, vheads=heads_of(name))
    gates, options = CALLS[name]
    states = np.concatenate([drawn["initial_state"], -drawn["initial_state"]])
    given = {n: drawn[n] for n in ("q", "k", "v")} | {n: drawn[x] for n, x in gates.items()}
    call = getattr(compat, name)
    o, last = call(
        **given, **options, initial_state=states, output_final_state=True, cu_seqlens=np.array([0, 4, 7])
    )
    for row, (start, stop) in enumerate([(0, 4), (4, 7)]):
        one = {n: x if n == "g_gamma" else x[:, start:stop] for n, x in given.items()}
        want = call(**one, **options, initial_state=states[row : row + 1], output_final_state=True)
        assert arrays.deviation(o[:, start:stop], want[0]) <= 1e-12
        assert arrays.deviation(last[row : row + 1], want[1]) <= 1e-12


def test_normalised_linear_attention_packed_and_backwards():
    """The sum of keys, by its definition, in each sequence and direction."""
    d = {n: np.abs(x) for n, x in draw(3, batch=1, time=7, vheads=H).items()}
    q, k, v = d["q"], d["k"], d["v"]
    z = np.abs(np.random.default_rng(4).standard_normal((2, 1, H, K)))
    states = np.concatenate([d["initial_state"]] * 2)
    call = compat.fused_recurrent_linear_attn
    for reverse in (False, True):
        o, (last, sums) = call(
            q, k, v, initial_state=(states, z), normalize=True, reverse=reverse, cu_seqlens=[0, 4, 7],
            output_final_state=True,
        )  # fmt: skip
        for row, (start, stop) in enumerate([(0, 4), (4, 7)]):
            cut = slice(start, stop)
            order = slice(None, None, -1) if reverse else slice(None)
            total = np.cumsum(k[:, cut][:, order], axis=1)[:, order] + z[row]
            plain = call(
                q[:, cut],
                k[:, cut],
                v[:, cut],
                initial_state=states[:1],
                reverse=reverse,
                output_final_state=True,
            )
            want = plain[0] / ((q[:, cut] * K**-0.5 * total).sum(-1, keepdims=True) + 1e-10)
            assert arrays.deviation(o[:, cut], want) <= 1e-12
            assert arrays.deviation(last[row : row + 1], plain[1]) <= 1e-12
            assert arrays.deviation(sums[row], total[0, :1] if reverse else total[0, -1:]) <= 1e-12


def test_sum_of_keys_without_a_state():
    d = {n: np.abs(x) for n, x in draw(5, vheads=H).items()}
    z = d["k"][:, :1]
    with_zeros = compat.chunk_linear_attn(d["q"], d["k"], d["v"], initial_state=(0 * d["initial_state"], z))[
        0
    ]
    assert np.array_equal(
        compat.chunk_linear_attn(d["q"], d["k"], d["v"], initial_state=(None, z))[0], with_zeros
    )


def test_host_copy_of_the_bounds_is_what_counts():
    d = draw(6, batch=1)
    inputs = (d["q"], d["k"], d["v"], d["head"], d["beta"])
    call = compat.chunk_gated_delta_rule
    want = call(*inputs, cu_seqlens=[0, 2, T])[0]
    assert np.array_equal(
        call(*inputs, cu_seqlens=np.array([0, 2, T]), cu_seqlens_cpu=np.array([0, 2, T]))[0], want
    )
    with pytest.raises(scanfield.ArgumentError, match="cu_seqlens_cpu"):
        call(*inputs, cu_seqlens_cpu=np.array([0, 2, T]))
    with pytest.raises(scanfield.ShapeError, match="cu_seqlens_cpu"):
        call(*inputs, cu_seqlens=[0, 2, T], cu_seqlens_cpu=[0, T])


def test_softplus_and_bounded_gate_are_told_apart():
    """A checkpoint of one gate under the other would be nonsense: -exp(0) ln 2 and -5 / 2."""
    key = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    ones = np.ones((1, 2, 1, 1))
    arguments = (ones, key, key, 0 * ones, ones[..., 0])
    gate = {"use_gate_in_kernel": True, "A_log": np.zeros(1), "dt_bias": np.zeros(1), "scale": 1.0}
    assert np.allclose(compat.chunk_kda(*arguments, **gate)[0].ravel(), [1, 0.5], atol=1e-6)
    bounded = compat.chunk_kda(*arguments, **gate, lower_bound=-5.0)[0]
    assert np.allclose(bounded.ravel(), [1, 0.0820849986], atol=1e-6)
    with pytest.raises(scanfield.ArgumentError, match="lower_bound: 3"):
        compat.chunk_kda(*arguments, **gate, lower_bound=3.0)


def test_old_name_of_the_state_layout():
    d = draw(7)
    inputs = (d["q"], d["k"], d["v"], d["head"], d["beta"])
    options = {"initial_state": d["initial_state"].swapaxes(2, 3), "output_final_state": True}
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, state = compat.chunk_gated_delta_rule(*inputs, **options, transpose_state_layout=True)
    want = compat.chunk_gated_delta_rule(*inputs, **options, state_v_first=True)
    assert np.array_equal(o, want[0]) and np.array_equal(state, want[1])
    with pytest.raises(scanfield.ArgumentError, match=r"transpose_state_layout: .*state_v_first"):
        compat.chunk_gated_delta_rule(*inputs, state_v_first=True, transpose_state_layout=True)


D = draw(8)
GDN = (D["q"], D["k"], D["v"], D["head"], D["beta"])
KDA = (D["q"], D["k"], D["v"], D["g"], D["beta"])


@pytest.mark.parametrize(
    "name", [name for name in CALLS if "gdn2" in name or "kda" in name or "gated_delta_rule" in name]
)
def test_parameters_of_a_gate_that_is_not_asked_for_are_refused(name):
    """Nothing that upstream ignores is ignored here."""
    function, (gates, _) = getattr(compat, name), CALLS[name]
    given = {word: D[word] for word in ("q", "k", "v")} | {word: D[key] for word, key in gates.items()}
    bound = {} if "gated_delta_rule" in name else {"lower_bound": -1.0}
    for word, value in ({"A_log": np.zeros(VH), "dt_bias": np.zeros(VH)} | bound).items():
        with pytest.raises(scanfield.ArgumentError, match=f"^{word}: .*use_gate_in_kernel=False"):
            function(**given, **{word: value})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: compat.fused_recurrent_gated_delta_rule(*GDN), scanfield.ShapeError, "gk: .*is it beta"),
        (lambda: compat.chunk_comba(D["q"], D["k"], D["p"], D["v"], D["head"]), scanfield.ShapeError, "p: shape"),
        (lambda: compat.chunk_gated_delta_rule(*GDN, head_first=True), scanfield.ArgumentError, "head_first"),
        (lambda: compat.chunk_kda(*KDA, initial_states=None), scanfield.ArgumentError, "initial_states: chunk_kda"),
        (lambda: compat.chunk_kda(*KDA, cp_context=object()), scanfield.ArgumentError, "cp_context: .*summarise"),
        (lambda: compat.chunk_kda(*KDA, allow_neg_eigval=True), scanfield.ArgumentError, "allow_neg_eigval"),
        (lambda: compat.chunk_kda(*KDA, use_gate_in_kernel=True), scanfield.ArgumentError, "A_log: None"),
        (
            lambda: compat.chunk_kda(*KDA, use_gate_in_kernel=True, A_log=np.zeros(3)),
            scanfield.ShapeError, r"A_log: shape \(3,\).*4 entries",
        ),
        (
            lambda: compat.chunk_kda(*KDA, use_gate_in_kernel=True, A_log=np.zeros(VH), dt_bias=np.zeros(VH)),
            scanfield.ShapeError, r"dt_bias: shape \(4,\).*12 entries",
        ),
        (
            lambda: compat.chunk_kda(*KDA, use_gate_in_kernel=True, A_log=np.zeros(VH), safe_gate=True),
            scanfield.ArgumentError, "lower_bound: None; safe_gate",
        ),
        (
            lambda: compat.chunk_kda(
                *KDA, use_gate_in_kernel=True, A_log=np.zeros(VH), safe_gate=True, lower_bound=-6.0
            ),
            scanfield.ArgumentError, r"lower_bound: -6.0; safe_gate.*\[-5, 0\)",
        ),
        (
            lambda: compat.fused_recurrent_gated_delta_rule(
                *GDN[:3], use_gate_in_kernel=True, A_log=np.zeros(VH), beta=D["beta"]
            ),
            scanfield.ArgumentError, "g: None",
        ),
        (lambda: compat.chunk_gla(*KDA[:4]), scanfield.ShapeError, "v: .*4 heads; allowed is 2"),
        (lambda: compat.chunk_kda(D["q"][:, :, :1], *KDA[1:]), scanfield.ShapeError, "k: shape"),
        (lambda: compat.chunk_kda(D["q"], D["k"], D["v"][:, :, :3], *KDA[3:]), scanfield.ShapeError, "v: .*3 heads"),
        (lambda: compat.chunk_kda(*KDA[:3], D["head"], D["beta"]), scanfield.ShapeError, "g: shape"),
        (lambda: compat.chunk_kda(*KDA, cu_seqlens=[0, T]), scanfield.ShapeError, "cu_seqlens: .*batch must be 1"),
        (
            lambda: compat.chunk_kda(
                *(x[:1] for x in KDA), cu_seqlens=[0, 2, T], initial_state=D["initial_state"][:1]
            ),
            scanfield.ShapeError, r"initial_state: shape \(1, 4, 3, 2\)",
        ),
        (
            lambda: compat.chunk_gated_delta_product(*GDN, num_householder=0),
            scanfield.ArgumentError, "num_householder: 0",
        ),
        (
            lambda: compat.chunk_gated_delta_product(*GDN, num_householder=2),
            scanfield.ShapeError, r"k: shape.*time\*num_householder",
        ),
        (
            lambda: compat.chunk_linear_attn(
                D["q"], D["k"], D["v"][:, :, :H], initial_state=(1, 2, 3)
            ),
            scanfield.ArgumentError, "initial_state: a tuple of 3",
        ),
        (lambda: compat.chunk_dplr_delta_rule(*KDA), scanfield.BackendError, "chunk_dplr_delta_rule: .*no dplr"),
        (compat.fused_recurrent_dplr_delta_rule, scanfield.BackendError, "dplr"),
        (compat.chunk_rwkv7, scanfield.BackendError, "chunk_rwkv7: .*no rwkv7"),
        (compat.fused_recurrent_rwkv7, scanfield.BackendError, "rwkv7"),
        (
            lambda: compat.chunk_gated_delta_product(*GDN[:1], None, *GDN[2:], num_householder=2),
            scanfield.ScanfieldError, "^k: expected an array",
        ),
        (
            lambda: compat.chunk_gated_delta_product(*GDN[:4], None, num_householder=1),
            scanfield.ScanfieldError, "^beta: expected an array",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    "name", [name for name in compat.__all__ if "dplr" not in name and "rwkv7" not in name]
)
def test_unknown_keywords_are_refused(name):
    """Swallowed, a misspelt cu_seqlens would leak states between sequences."""
    needed = [p for p in inspect.signature(getattr(compat, name)).parameters.values() if p.default is p.empty]
    with pytest.raises(TypeError, match="cu_seqlen_q"):
        getattr(compat, name)(*(None for p in needed if p.kind is not p.VAR_KEYWORD), cu_seqlen_q=None)
