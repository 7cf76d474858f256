"""Which kernels run a network's sweeps: a backend's, those with ``out=``, or the generic ones."""

from __future__ import annotations

import sys
from typing import Any

from scanfield.arrays import Library, Namespace
from scanfield.dispatch import choose, family
from scanfield.dispatch.registry import is_blocked
from scanfield.pinn.inplace import InPlace
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.network import Network
from scanfield.pinn.primitives import Primitives

FAMILY = "pinn"
WRITES = ("numpy", "cupy")
"""Libraries whose functions take ``out=`` and need nothing else."""

_OWN: dict[str, dict[str, Kernels]] = {}


def kernels_for(network: Network) -> Kernels:
    """The kernels for the arrays of a network, or those that ``scanfield.use(method=...)`` asks for.

    ``generic`` makes new arrays, ``generic.out`` writes into buffers; backends add theirs (``numpy.numba``,
    ``torch.out``, ``torch.compile``, ``jax.jit``). The choice never changes a result beyond rounding.
    """
    own = _OWN.get(network.library)
    if own is None:
        own = _OWN[network.library] = own_kernels(network.library, network.xp)
    found: Kernels = choose(FAMILY, network.library, network.device, own)
    return found


def primitives_for(library: Library, device: str) -> Primitives:
    """What writes into arrays of a library on a kind of device, one step at a time: its kernels' own, if they write."""
    own = _OWN.get(library.name)
    if own is None:
        own = _OWN[library.name] = own_kernels(*library)
    found = choose(FAMILY, library.name, device, own)
    return found if isinstance(found, Primitives) else Primitives(sys.modules[library.name])


def methods(network: Network, *, by_name: bool = False) -> list[str]:
    """The names of all kernels that can run a network here, with those that run only when they are asked for."""
    loaded = family(FAMILY, network.library, network.device)
    own = own_kernels(network.library, network.xp)
    ready = [e for e in loaded if not e.absent and not is_blocked(e.name) and (e.default or by_name)]
    return [*own, *(entry.name for entry in ready)]


def own_kernels(library: str, xp: Namespace) -> dict[str, Kernels]:
    """The forms that need no backend."""
    erf = _erf(library)
    found = {"generic": Kernels(xp, erf)}
    if library in WRITES:
        found["generic.out"] = InPlace(xp, erf, sys.modules[library])
    return found


def _erf(library: str) -> Any:
    """A library's own erf, where it has one that SciPy or CuPy bring; None otherwise."""
    try:
        if library == "numpy":
            from scipy.special import erf
        elif library == "cupy":
            from cupyx.scipy.special import erf
        else:
            return None
    except ImportError:
        return None
    return erf
