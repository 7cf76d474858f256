"""Importable stand-ins for mamba_ssm, causal_conv1d and fla where the real packages are absent.

A finder at the front of ``sys.meta_path`` answers for the names of a stand-in, so that ``import``, ``find_spec``
and reload see ordinary packages; nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Self

import scanfield
from scanfield.compat import fla, mamba_ssm
from scanfield.errors import ArgumentError, StateError

# The interfaces that the stand-ins follow; their version says so, and that it is not the real one.
_VERSIONS = {"mamba_ssm": "2.3.2.post1", "causal_conv1d": "1.6.0", "fla": "0.6.0"}

_MAMBA = {
    "mamba_ssm": ("selective_scan_fn", "mamba_inner_fn"),
    "mamba_ssm.modules": (),
    "mamba_ssm.modules.ssd_minimal": ("ssd_minimal_discrete",),
    "mamba_ssm.ops": (),
    "mamba_ssm.ops.selective_scan_interface": ("selective_scan_fn", "selective_scan_ref", "mamba_inner_fn"),
    "mamba_ssm.ops.triton": (),
    "mamba_ssm.ops.triton.selective_state_update": ("selective_state_update",),
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
    ),
}
_CONVOLUTION = {
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "causal_conv1d.causal_conv1d_interface": ("causal_conv1d_fn", "causal_conv1d_update"),
}
_FAMILIES = {
    "comba": "comba",
    "delta_rule": "delta_rule",
    "gated_delta_product": "gated_delta_product",
    "gated_delta_rule": "gated_delta_rule",
    "gdn2": "gdn2",
    "generalized_delta_rule": "dplr_delta_rule",
    "generalized_delta_rule.dplr": "dplr_delta_rule",
    "gla": "gla",
    "kda": "kda",
    "linear_attn": "linear_attn",
    "retention": "retention",
    "rwkv7": "rwkv7",
    "simple_gla": "simple_gla",
}
_FORMS = ("chunk", "fused_recurrent")


def _fla_modules() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"fla": (), "fla.ops": tuple(fla.__all__)}
    for folder, rule in _FAMILIES.items():
        rules = (rule, "gdn") if rule == "gated_delta_rule" else (rule,)
        forms = {form: tuple(f"{form}_{x}" for x in rules if f"{form}_{x}" in fla.__all__) for form in _FORMS}
        found[f"fla.ops.{folder}"] = tuple(name for names in forms.values() for name in names)
        if folder != "generalized_delta_rule":
            found |= {f"fla.ops.{folder}.{form}": names for form, names in forms.items() if names}
    return found


_MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mamba_ssm": _MAMBA,
    "causal_conv1d": _CONVOLUTION,
    "fla": _fla_modules(),
}
_SOURCES: Mapping[str, ModuleType] = {"mamba_ssm": mamba_ssm, "causal_conv1d": mamba_ssm, "fla": fla}
_LOCK = threading.Lock()


class _StandIn(MetaPathFinder, Loader):
    """Finds and fills the modules of one package."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.modules = _MODULES[package]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        inside = any(name.startswith(f"{fullname}.") for name in self.modules)
        origin = f"scanfield.compat stand-in for {self.package}"
        return ModuleSpec(fullname, self, origin=origin, is_package=inside or fullname == self.package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"A stand-in for {name}, by scanfield {scanfield.__version__}."
        names = self.modules[name]
        for function in names:
            setattr(module, function, getattr(_SOURCES[self.package], function))
        if name == self.package:
            module.__dict__["__version__"] = f"{_VERSIONS[name]}+scanfield"
        module.__dict__["__all__"] = list(names)


class Installation:
    """Stand-ins that ``install`` has put up: a context manager, or ``undo()``."""

    def __init__(self, finders: Sequence[_StandIn]) -> None:
        self._finders = list(finders)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that this installation has put up and has not taken down."""
        return tuple(finder.package for finder in self._finders)

    def undo(self) -> None:
        """Take the stand-ins down again. Functions that a program has imported from them keep working."""
        with _LOCK:
            for finder in self._finders:
                if finder in sys.meta_path:
                    sys.meta_path.remove(finder)
                for name in finder.modules:
                    spec = getattr(sys.modules.get(name), "__spec__", None)
                    if spec is not None and spec.loader is finder:
                        del sys.modules[name]
            self._finders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Installation({', '.join(self.packages)})"


def install(*packages: str, replace: bool = False) -> Installation:
    """Make ``mamba_ssm``, ``causal_conv1d`` and ``fla`` importable where the real packages are absent.

    Code written for them then runs unchanged, on arrays of any library, with no GPU: their modules hold the
    functions of ``compat.mamba_ssm`` and ``compat.fla``, under upstream's paths. Call it before the code that
    imports them; programs that look for these packages when they are imported (as transformers' models do) see what
    is there at that moment.

    Parameters
    ----------
    *packages : "mamba_ssm", "causal_conv1d" or "fla"
    replace : bool
        Stand in for a package that is installed but was not imported yet: for mamba_ssm without its compiled
        kernels, or fla without Triton, whose import fails.

    Returns
    -------
    Installation
        ``undo()`` or the end of a ``with`` block takes down what this call has put up. A package that an earlier
        call put up stays that call's.

    Raises
    ------
    ArgumentError
        For no package or one that has no stand-in.
    StateError
        For a package that is installed (unless ``replace``) or imported already; then nothing is put up.

    Examples
    --------
    >>> import numpy
    >>> from scanfield import compat
    >>> with compat.install("fla", replace=True):
    ...     from fla.ops.gla import chunk_gla
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> chunk_gla(ones, ones, ones, numpy.log(0.5 * ones))[0].ravel()
    array([1.  , 1.5 , 1.75])
    """
    known = ", ".join(repr(name) for name in _MODULES)
    if not packages:
        raise ArgumentError(f"packages: none given; allowed are {known}")
    for package in packages:
        if package not in list(_MODULES):  # no hash: it may be anything
            raise ArgumentError(f"packages: {package!r}; allowed are {known}")
    with _LOCK:
        missing = [name for name in dict.fromkeys(packages) if not _stands(name)]
        for package in missing:
            _check_absent(package, replace)
        finders = [_StandIn(package) for package in missing]
        sys.meta_path[:0] = finders
    return Installation(finders)


def _stands(package: str) -> bool:
    return any(isinstance(finder, _StandIn) and finder.package == package for finder in sys.meta_path)


def _check_absent(package: str, replace: bool) -> None:
    there = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    if there:
        raise StateError(
            f"{package}: imported already ({', '.join(sorted(there)[:3])}); a stand-in must be put up before that. "
            f"Its functions are at hand without one, in scanfield.compat.{_home(package)}"
        )
    if replace:
        return
    spec: Any = importlib.util.find_spec(package)
    if spec is not None:
        raise StateError(
            f"{package}: the real package is installed ({spec.origin or 'a namespace package'}); "
            f"install({package!r}, replace=True) stands in for it in this process"
        )


def _home(package: str) -> str:
    return "fla" if package == "fla" else "mamba_ssm"
