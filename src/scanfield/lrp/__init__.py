"""Relevance (layer-wise relevance propagation, LRP): what of a result came from where."""

from scanfield.lrp.scans import Relevance, Report, relevance, supports
from scanfield.lrp.tokens import TokenRelevance, explain

__all__ = ["Relevance", "Report", "TokenRelevance", "explain", "relevance", "supports"]
