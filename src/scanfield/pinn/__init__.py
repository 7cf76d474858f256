"""Helmholtz problems."""
