"""The laboratory: what repeats published tables and compares rivals.

It imports fedrot, which does not know it, and is run from a checkout. ``import
reproductions.plugins`` registers its anchors, aggregations, adapter methods and kinds
of strategies.
"""
