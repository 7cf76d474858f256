"""Relevance (layer-wise relevance propagation, LRP): what of a result came from where."""

from scanfield.lrp.scans import Relevance, Report, relevance, supports

__all__ = ["Relevance", "Report", "relevance", "supports"]
