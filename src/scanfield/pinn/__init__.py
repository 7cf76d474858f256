"""Helmholtz problems solved by a network whose derivatives, and their gradients, are closed formulas.

No automatic differentiation runs anywhere. Arrays may be of NumPy, CuPy, PyTorch, JAX, or of any library that follows the
array API standard.
"""

from scanfield.pinn.check import GradientCheck, check_gradients
from scanfield.pinn.fourier import Embedding, FourierFeatures, PeriodicFeatures, RawCoordinates
from scanfield.pinn.jacobian import Jacobian, jacobian
from scanfield.pinn.jets import Jet, jet
from scanfield.pinn.loss import LossAndGrad, loss_and_grad, residuals
from scanfield.pinn.network import Network
from scanfield.pinn.terms import Dependence, Piece, PreparedTerms, Term, prepare_terms

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
    "check_gradients",
    "jacobian",
    "jet",
    "loss_and_grad",
    "prepare_terms",
    "residuals",
]
