"""scanfield: sequence recurrences and Helmholtz networks for arrays of any library."""

__version__ = "0.1.0"

from scanfield.affine import Affine, apply, compose, summarise
from scanfield.dispatch import backends, operations, use
from scanfield.errors import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ScanfieldError,
    ShapeError,
    StateError,
)
from scanfield.gradients import GradientReport, check_gradients, vjp
from scanfield.inspection import explain, warmup
from scanfield.lrp import Relevance, relevance
from scanfield.scans.associative import associative_scan
from scanfield.scans.delta_rule import comba, delta_rule, gated_delta_rule, kda
from scanfield.scans.gated_delta import gdn2
from scanfield.scans.gated_delta_product import gated_delta_product
from scanfield.scans.linear import linear_scan
from scanfield.scans.linear_attention import gla, linear_attention, retention
from scanfield.scans.selective import selective_scan
from scanfield.scans.ssd import ssd
from scanfield.scans.states import ScanStates
from scanfield.scans.surface import ScanResult
from scanfield.threads import get_num_threads, set_num_threads

__all__ = [
    "Affine",
    "ArgumentError",
    "BackendError",
    "DeviceError",
    "DtypeError",
    "GradientReport",
    "Relevance",
    "ScanResult",
    "ScanStates",
    "ScanfieldError",
    "ShapeError",
    "StateError",
    "apply",
    "associative_scan",
    "backends",
    "check_gradients",
    "comba",
    "compose",
    "delta_rule",
    "explain",
    "gated_delta_product",
    "gated_delta_rule",
    "gdn2",
    "get_num_threads",
    "gla",
    "kda",
    "linear_attention",
    "linear_scan",
    "operations",
    "relevance",
    "retention",
    "selective_scan",
    "set_num_threads",
    "ssd",
    "summarise",
    "use",
    "vjp",
    "warmup",
]
