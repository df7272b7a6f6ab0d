"""Kernels: layouts, packing and the arithmetic of a step; see ports/kernels.py for the contract."""
