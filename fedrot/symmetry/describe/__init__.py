"""The elements of a family's description: spaces, projections, layers and task
heads.
"""
