"""Helmholtz problems solved by a network whose derivatives, and their gradients, are closed formulas.

No automatic differentiation runs anywhere. Arrays may be of NumPy, CuPy, PyTorch, JAX, or of any library that follows the
array API standard.
"""

from scanfield.pinn.check import GradientCheck, check_gradients
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
from scanfield.pinn.terms import Dependence, Piece, PreparedTerms, Term, prepare_terms
from scanfield.pinn.workspace import Workspace

__all__ = [
    "Dependence",
    "Embedding",
    "FourierFeatures",
    "GradientCheck",
    "Jacobian",
    "Jet",
    "LossAndGrad",
    "Network",
    "PeriodicFeatures",
    "Piece",
    "PreparedTerms",
    "RawCoordinates",
    "Term",
    "Workspace",
    "check_gradients",
    "fourier_backward",
    "fourier_backward_inplace",
    "fourier_grad",
    "jacobian",
    "jet",
    "layer_backward",
    "layer_backward_inplace",
    "loss_and_grad",
    "memset_zero_out",
    "mse_backward",
    "mse_backward_inplace",
    "mul_scalar_out",
    "prepare_terms",
    "residuals",
    "sub_out",
    "sum_rows_out",
    "tanh_deriv_mul_out",
]
