"""Loads single functions of the peers, whose packages cannot be imported where there is no GPU compiler.

flash-linear-attention and mamba keep, beside their kernels, reference functions of plain PyTorch; the packages
around them need Triton at import. So a file that stands alone is loaded by its path, and of a file that does not,
the functions asked for are compiled from their source alone.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# import name -> distribution name, in the order in which the summary prints them
PEERS = {
    "fla": "fla-core",
    "mamba_ssm": "mamba-ssm",
    "transformers": "transformers",
    "onnx": "onnx",
    "scipy": "scipy",
    "skfem": "scikit-fem",
    "torch": "torch",
    "einops": "einops",
}


def versions() -> dict[str, str | None]:
    """The distribution of each peer with its version, None where it is not installed."""
    found: dict[str, str | None] = {}
    for module, distribution in PEERS.items():
        missing = importlib.util.find_spec(module) is None
        found[distribution] = None if missing else importlib.metadata.version(distribution)
    return found


def folder(package: str) -> Path:
    """The folder of a package, found without importing it; skips the test where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the peer {PEERS[package]} is not installed", allow_module_level=True)
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def load_file(package: str, relative: str) -> ModuleType:
    """The module in that file of the package, executed alone under a private name."""
    path = folder(package) / relative
    name = "_peer_" + package + "_" + relative.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_functions(
    package: str, relative: str, names: tuple[str, ...], surroundings: dict[str, Any]
) -> dict[str, Any]:
    """The named top-level functions of that file, compiled without the rest of it.

    `surroundings` holds the names that their bodies use (torch, F, rearrange, ...).
    """
    path = folder(package) / relative
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = set(names) - {node.name for node in wanted}
    assert not missing, f"{package}/{relative} has no function {', '.join(sorted(missing))}"
    scope = dict(surroundings)
    exec(compile(ast.Module(body=wanted, type_ignores=[]), str(path), "exec"), scope)  # noqa: S102
    return {name: scope[name] for name in names}
