"""fedrot: alignment of clients' transformers before they are averaged.

Sources: Zhang et al., "Beyond the Permutation Symmetry of Transformers" (ICML 2025);
Verma & Elbayad, "Merging Text Transformer Models from Different Initializations" (TMLR
2024); Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models"
(ICLR 2023).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedrot import aggregation
    from fedrot.alignment.align import Alignment, align, random_equivalent
    from fedrot.alignment.anchors import align_round
    from fedrot.alignment.diagnosis import diagnose
    from fedrot.check import check_function
    from fedrot.collect.activations import Activations, collect_activations
    from fedrot.collect.fisher import collect_fisher
    from fedrot.collect.gram import collect_gram
    from fedrot.collect.random_inputs import random_inputs
    from fedrot.collect.trained import completed
    from fedrot.errors import FedrotError, SymmetryError, UpdateError
    from fedrot.matching.problem import Anchor
    from fedrot.options import AlignmentOptions
    from fedrot.report import AlignmentReport
    from fedrot.symmetry import WHOLE_MODEL, Symmetry, supported, symmetry_of
    from fedrot.symmetry.canonical import canonical

__version__ = "0.1.0"

__all__ = [
    "WHOLE_MODEL",
    "Activations",
    "Alignment",
    "AlignmentOptions",
    "AlignmentReport",
    "Anchor",
    "FedrotError",
    "Symmetry",
    "SymmetryError",
    "UpdateError",
    "aggregation",
    "align",
    "align_round",
    "canonical",
    "check_function",
    "collect_activations",
    "collect_fisher",
    "collect_gram",
    "completed",
    "diagnose",
    "random_equivalent",
    "random_inputs",
    "supported",
    "symmetry_of",
]

#: The names above by module; the other names are packages. All are imported at first
#: use, so that the command line shows its help without torch.
_NAMES = {
    "fedrot.alignment": "Alignment align random_equivalent",
    "fedrot.alignment.anchors": "align_round",
    "fedrot.check": "check_function",
    "fedrot.collect.activations": "Activations collect_activations",
    "fedrot.collect.fisher": "collect_fisher",
    "fedrot.collect.gram": "collect_gram",
    "fedrot.collect.random_inputs": "random_inputs",
    "fedrot.collect.trained": "completed",
    "fedrot.alignment.diagnosis": "diagnose",
    "fedrot.errors": "FedrotError SymmetryError UpdateError",
    "fedrot.matching.problem": "Anchor",
    "fedrot.options": "AlignmentOptions",
    "fedrot.report": "AlignmentReport",
    "fedrot.symmetry": "WHOLE_MODEL Symmetry supported symmetry_of",
    "fedrot.symmetry.canonical": "canonical",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'fedrot' has no attribute '{name}'")
    module = import_module(_MODULES.get(name, f"fedrot.{name}"))
    value = getattr(module, name) if name in _MODULES else module
    # Python asks this function only for names that the module does not have.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
