"""Sections of reports that published pages need: the map of regimes, and merged subsets
of clients.
"""
