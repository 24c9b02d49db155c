"""Secure aggregation of aligned updates."""
