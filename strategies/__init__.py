"""Flower strategies that align every reply to a common anchor before it is averaged."""

from fedrot.strategies.aligned import DEFAULT_ANCHOR, Aligned, FedRot

__all__ = ["DEFAULT_ANCHOR", "Aligned", "FedRot"]
