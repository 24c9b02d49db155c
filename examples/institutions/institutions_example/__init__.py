"""Institutions with models of their own, averaged once."""
