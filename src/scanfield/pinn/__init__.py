"""Helmholtz problems solved by a network whose derivatives, and their gradients, are closed formulas.

No automatic differentiation runs anywhere. Arrays may be of NumPy, CuPy, PyTorch, JAX, or of any library that follows the
array API standard.
"""

from scanfield.pinn import solutions
from scanfield.pinn.absorbing import PML
from scanfield.pinn.boundary import (
    Dirichlet,
    Impedance,
    Interface,
    Neumann,
    Periodic,
    Robin,
    Sommerfeld,
    Unknown,
)
from scanfield.pinn.check import GradientCheck, check_gradients
from scanfield.pinn.checkpoint import load_network, save_network
from scanfield.pinn.compound import Difference, PointSet
from scanfield.pinn.diagnose import DiagnosisWarning, diagnose
from scanfield.pinn.domains import Ball, Box, Disk, Domain, Interval
from scanfield.pinn.explain import explain
from scanfield.pinn.fit import Fit, Record
from scanfield.pinn.fourier import Embedding, FourierFeatures, PeriodicFeatures, RawCoordinates
from scanfield.pinn.jacobian import Jacobian, jacobian
from scanfield.pinn.jets import Jet, jet
from scanfield.pinn.layerwise import (
    fourier_backward,
    fourier_backward_inplace,
    fourier_grad,
    layer_backward,
    layer_backward_inplace,
    memset_zero_out,
    mse_backward,
    mse_backward_inplace,
    mul_scalar_out,
    sub_out,
    sum_rows_out,
    tanh_deriv_mul_out,
)
from scanfield.pinn.loss import LossAndGrad, loss_and_grad, residuals
from scanfield.pinn.network import Network
from scanfield.pinn.problem import Data, Helmholtz, Sample
from scanfield.pinn.solutions import Solution
from scanfield.pinn.terms import Dependence, Piece, PreparedTerms, Term, prepare_terms
from scanfield.pinn.train import train
from scanfield.pinn.workspace import Workspace

__all__ = [
    "PML",
    "Ball",
    "Box",
    "Data",
    "Dependence",
    "DiagnosisWarning",
    "Difference",
    "Dirichlet",
    "Disk",
    "Domain",
    "Embedding",
    "Fit",
    "FourierFeatures",
    "GradientCheck",
    "Helmholtz",
    "Impedance",
    "Interface",
    "Interval",
    "Jacobian",
    "Jet",
    "LossAndGrad",
    "Network",
    "Neumann",
    "Periodic",
    "PeriodicFeatures",
    "Piece",
    "PointSet",
    "PreparedTerms",
    "RawCoordinates",
    "Record",
    "Robin",
    "Sample",
    "Solution",
    "Sommerfeld",
    "Term",
    "Unknown",
    "Workspace",
    "check_gradients",
    "diagnose",
    "explain",
    "fourier_backward",
    "fourier_backward_inplace",
    "fourier_grad",
    "jacobian",
    "jet",
    "layer_backward",
    "layer_backward_inplace",
    "load_network",
    "loss_and_grad",
    "memset_zero_out",
    "mse_backward",
    "mse_backward_inplace",
    "mul_scalar_out",
    "prepare_terms",
    "residuals",
    "save_network",
    "solutions",
    "sub_out",
    "sum_rows_out",
    "tanh_deriv_mul_out",
    "train",
]
