"""How Sphinx makes the manual: `nox -s docs`, into docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

import scanfield

sys.path.insert(0, str(Path(__file__).parent))
import registry_tables

registry_tables.write(Path(__file__).parent / "_generated")

project = "scanfield"
author = "the scanfield contributors"
copyright = f"2026, {author}"  # noqa: A001 (the name that Sphinx reads)
version = release = scanfield.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"scanfield {version}"
html_show_sourcelink = False

myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

# The reference names what stands in the packages of these libraries; the manual is made without them.
autodoc_mock_imports = ["jax", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and types stand in the docstrings, in words
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

nb_execution_mode = "force"  # notebooks lie here without results: what is shown is what these versions gave
nb_execution_raise_on_error = True
nb_execution_timeout = 60  # seconds a cell
