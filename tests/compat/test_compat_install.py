"""Stand-ins for packages that are absent: each test in a process of its own, in which the real ones are hidden or shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from processes import python

HIDE = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
HIDDEN = {"mamba_ssm", "causal_conv1d", "fla"}

class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else find(name, path, target)

sys.meta_path[:] = [Hiding if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""
REAL = """
import pathlib, sys, tempfile
place = pathlib.Path(tempfile.mkdtemp())
(place / "fla").mkdir()
(place / "fla" / "__init__.py").write_text("raise RuntimeError('no Triton here')")
sys.path.insert(0, str(place))
"""


def run(script, *before):
    return python("\n".join([*before, *script.strip().splitlines()]), Path(__file__).parent)


def test_importing_compat_is_light():
    run(
        """
import sys, threading
import scanfield.compat
heavy = {"torch", "jax", "cupy", "dask", "numba", "transformers", "mamba_ssm", "fla"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""
    )


def test_packages_with_their_submodules_and_specs():
    run(
        """
import importlib, importlib.util, inspect
from scanfield import compat
assert importlib.util.find_spec("mamba_ssm") is None
done = compat.install("mamba_ssm", "causal_conv1d", "fla")
assert done.packages == ("mamba_ssm", "causal_conv1d", "fla") and "fla" in repr(done)
for name in ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "fla.ops.kda", "fla.ops.kda.chunk", "causal_conv1d"):
    spec = importlib.util.find_spec(name)
    assert spec.name == name and spec.loader is not None and "scanfield" in spec.origin
    module = importlib.import_module(name)
    assert module.__spec__.name == name and module.__name__ == name and "scanfield" in module.__doc__
    assert all(getattr(module, each) for each in module.__all__)
import fla, mamba_ssm
assert fla.__version__ == "0.6.0+scanfield" and mamba_ssm.__version__ == "2.3.2.post1+scanfield"
assert fla.__path__ == [] and mamba_ssm.selective_scan_fn is compat.mamba_ssm.selective_scan_fn
from fla.ops import chunk_gdn, fused_recurrent_rwkv7
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from fla.ops.generalized_delta_rule.dplr.chunk import chunk_dplr_delta_rule
importlib.reload(fla)
try:
    from fla.ops.gsa import chunk_gsa
except ModuleNotFoundError as error:
    assert error.name == "fla.ops.gsa"
else:
    raise AssertionError("fla.ops.gsa has no stand-in")
again = compat.install("fla")
assert again.packages == ()
again.undo()
assert importlib.util.find_spec("fla") is not None
done.undo()
done.undo()
import sys
assert not [name for name in sys.modules if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d")]
assert importlib.util.find_spec("fla") is None
""",
        HIDE,
    )


def test_the_real_package_is_not_covered_up():
    run(
        """
import sys
from scanfield import StateError, ArgumentError, compat

def refused(error, text, *packages, **options):
    before = list(sys.meta_path)
    try:
        compat.install(*packages, **options)
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(packages)
    assert sys.meta_path == before

refused(StateError, "fla: the real package is installed", "mamba_ssm", "fla")
refused(ArgumentError, "'flash_attn'", "mamba_ssm", "flash_attn")
refused(ArgumentError, "none given")
refused(ArgumentError, "['fla']", ["fla"])
with compat.install("fla", replace=True) as there:
    import fla.ops
    assert fla.__version__.endswith("+scanfield")
sys.modules["mamba_ssm"] = sys
refused(StateError, "mamba_ssm: imported already", "mamba_ssm", replace=True)
try:
    import fla
except RuntimeError as error:
    assert "no Triton" in str(error)
else:
    raise AssertionError("the real package is not back")
""",
        HIDE.replace('"fla"}', "}"),
        REAL,
    )


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="upstream's code is PyTorch"
)


@pytest.mark.backend("torch")
@needs_torch
def test_code_written_for_mamba_ssm_runs_unchanged():
    """A Mamba block as mamba_ssm's own is written: fused training path, prefill by parts, decoding steps."""
    run(
        """
from scanfield import compat
compat.install("mamba_ssm", "causal_conv1d")

import torch
import torch.nn as nn
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update

class Mamba(nn.Module):
    def __init__(self, d_model, d_state=8, d_conv=4, expand=2):
        super().__init__()
        self.d_inner, self.dt_rank, self.d_state, self.d_conv = expand * d_model, 2, d_state, d_conv
        self.in_proj = nn.Linear(d_model, self.d_inner * 2, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + d_state * 2, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, hidden):
        xz = (self.in_proj.weight @ hidden.transpose(1, 2))
        return mamba_inner_fn(
            xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.out_proj.weight,
            self.out_proj.bias, -torch.exp(self.A_log.float()), None, None, self.D.float(),
            delta_bias=self.dt_proj.bias.float(), delta_softplus=True,
        )

    def prefill(self, hidden):
        x, z = self.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        conv_state = F.pad(x, (self.d_conv - x.shape[-1], 0))
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        dt, B, C = self.x_proj(x.transpose(1, 2)).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        y, ssm_state = selective_scan_fn(
            x, self.dt_proj.weight @ dt.transpose(1, 2), -torch.exp(self.A_log), B.transpose(1, 2), C.transpose(1, 2),
            self.D.float(), z=z, delta_bias=self.dt_proj.bias.float(), delta_softplus=True, return_last_state=True,
        )
        return self.out_proj(y.transpose(1, 2)), conv_state, ssm_state

    def step(self, hidden, conv_state, ssm_state):
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        x = causal_conv1d_update(x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        y = selective_state_update(
            ssm_state, x, F.linear(dt, self.dt_proj.weight), -torch.exp(self.A_log), B, C, self.D, z=z,
            dt_bias=self.dt_proj.bias, dt_softplus=True,
        )
        return self.out_proj(y)

torch.manual_seed(0)
block, hidden = Mamba(6), torch.randn(2, 9, 6)
whole = block(hidden)
whole.square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in block.parameters())
with torch.no_grad():
    first, conv_state, ssm_state = block.prefill(hidden[:, :5])
    rest = [block.step(hidden[:, t], conv_state, ssm_state) for t in range(5, 9)]
    parts = torch.cat([first, torch.stack(rest, dim=1)], dim=1)
assert (parts - whole).abs().max() <= 1e-6 * whole.abs().max() + 1e-7, (parts - whole).abs().max()
""",
        HIDE,
    )


@pytest.mark.backend("torch")
@needs_torch
def test_code_written_for_fla_runs_unchanged():
    """A gated delta layer as fla's own are written, in training and with a carried state."""
    run(
        """
from scanfield import compat
compat.install("fla")

import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

torch.manual_seed(0)
B, T, H, HV, K, V = 2, 11, 2, 4, 8, 6
q, k = (torch.randn(B, T, H, K, requires_grad=True) for _ in range(2))
v = torch.randn(B, T, HV, V, requires_grad=True)
g = F.logsigmoid(torch.randn(B, T, HV)).requires_grad_()
beta = torch.rand(B, T, HV).requires_grad_()
o, ht = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
(o.square().sum() + ht.sum()).backward()
assert all(x.grad is not None and x.grad.any() for x in (q, k, v, g, beta))
with torch.no_grad():
    state, outputs = None, []
    for t in range(T):
        cut = slice(t, t + 1)
        y, state = fused_recurrent_gated_delta_rule(
            q=q[:, cut], k=k[:, cut], v=v[:, cut], g=g[:, cut], beta=beta[:, cut], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )
        outputs.append(y)
assert (torch.cat(outputs, dim=1) - o).abs().max() <= 1e-5
assert (state - ht).abs().max() <= 1e-5
""",
        HIDE,
    )


@pytest.mark.backend("torch")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_takes_the_stand_ins_for_the_real_packages():
    """Its models look for the packages once, when they are imported; then they call ours, packed sequences included."""
    run(
        """
import sys
sys.path.insert(0, sys.argv[1])
from scanfield import compat
compat.install("mamba_ssm", "causal_conv1d", "fla")

import torch
from tiny_models import VOCABULARY, build
from scanfield.compat import _ssd

model = build("mamba2").backbone  # the model around it does not hand seq_idx on
ids = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
called = []
original = _ssd.ssd
_ssd.ssd = lambda *args, **kwargs: (called.append(1), original(*args, **kwargs))[1]
with torch.no_grad():
    packed = model(ids, seq_idx=torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32))[0]
    alone = torch.cat([model(ids[:, :4])[0], model(ids[:, 4:])[0]], dim=1)
assert len(called) == 6
assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
""",
        HIDE,
    )
