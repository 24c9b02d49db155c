"""Grids of loss barriers between small models, and the methods of the papers to match
them.
"""
