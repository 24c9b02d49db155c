"""fedrot: align clients' transformers to a common anchor before they are averaged.

Sources: Zhang et al., "Beyond the Permutation Symmetry of Transformers" (ICML 2025); Verma & Elbayad,
"Merging Text Transformer Models from Different Initializations" (TMLR 2024); Jin et al., "Dataless
Knowledge Fusion by Merging Weights of Language Models" (ICLR 2023).
"""

from fedrot import aggregation
from fedrot.alignment import Alignment, align, alignment_of, random_equivalent
from fedrot.anchors import ANCHORS, AlignedUpdate, align_round, base_cosine
from fedrot.check import check_function
from fedrot.collect.activations import Activations, collect_activations, probing
from fedrot.collect.fisher import collect_fisher
from fedrot.collect.gram import collect_gram, completed, compressed
from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport, GroupReport
from fedrot.research.interpolation import Barrier, interpolate, loss_barrier
from fedrot.research.learning import LearningOptions, learn_alignment, loss_of
from fedrot.research.repair import (
    UnitStatistics,
    average_statistics,
    repair,
    unit_statistics,
    variance_ratio,
)
from fedrot.symmetry import WHOLE_MODEL, Symmetry, supported, symmetry_of
from fedrot.symmetry.biases import canonical_biases

__version__ = "0.1.0"

__all__ = [
    "ANCHORS",
    "WHOLE_MODEL",
    "Activations",
    "AlignedUpdate",
    "Alignment",
    "AlignmentOptions",
    "AlignmentReport",
    "Anchor",
    "Barrier",
    "FedrotError",
    "GroupReport",
    "LearningOptions",
    "Symmetry",
    "SymmetryError",
    "UnitStatistics",
    "UpdateError",
    "aggregation",
    "align",
    "align_round",
    "alignment_of",
    "average_statistics",
    "base_cosine",
    "canonical_biases",
    "check_function",
    "collect_activations",
    "collect_fisher",
    "collect_gram",
    "completed",
    "compressed",
    "interpolate",
    "learn_alignment",
    "loss_barrier",
    "loss_of",
    "probing",
    "random_equivalent",
    "random_inputs",
    "repair",
    "supported",
    "symmetry_of",
    "unit_statistics",
    "variance_ratio",
]
