"""``fedrot.strategies``: Flower strategies that align replies before the average."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("flwr") is None:
    raise ModuleNotFoundError(
        "The strategies need Flower: pip install -c constraints.txt '.[flower]'"
    )

from fedrot.options import AlignmentOptions
from fedrot.strategies.aligned import Aligned
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.client.add_statistics import add_statistics
from fedrot.strategies.client.align_mod import align_mod
from fedrot.strategies.client.answers import answer_with_sums
from fedrot.strategies.client.client_rows import LabelledRows
from fedrot.strategies.client.moves import Matching, match_at_client
from fedrot.strategies.client.privacy import Privacy
from fedrot.strategies.client.site_model import site_model
from fedrot.strategies.fedrot import FedRot
from fedrot.strategies.fitting.class_priors import class_priors
from fedrot.strategies.fitting.fit_task_head import fit_task_head
from fedrot.strategies.fitting.held_out import evaluate_at_clients
from fedrot.strategies.fitting.public_rows import PublicRows
from fedrot.strategies.fitting.sites import report_sites
from fedrot.strategies.lora import AlignedLoRA, FedRotLoRA, adapter_record
from fedrot.strategies.round.guard import Guard
from fedrot.strategies.settings import Checkpointing, OtherBasis, Reporting, Server
from fedrot.strategies.wire.arrays import from_arrays, model_hash, to_arrays
from fedrot.strategies.wire.label_names import labels_record
from fedrot.strategies.wire.statistics_record import (
    statistics_record,
    wanted_statistics,
)

if TYPE_CHECKING:
    from fedrot.strategies.pooled_classifier import PooledClassifier

__all__ = [
    "Aligned",
    "AlignedLoRA",
    "AlignmentOptions",
    "Checkpointing",
    "FedRot",
    "FedRotLoRA",
    "Guard",
    "LabelledRows",
    "Matching",
    "OtherBasis",
    "PooledClassifier",
    "Privacy",
    "PublicRows",
    "ReplyStrategy",
    "Reporting",
    "Server",
    "adapter_record",
    "add_statistics",
    "align_mod",
    "answer_with_sums",
    "class_priors",
    "evaluate_at_clients",
    "fit_task_head",
    "from_arrays",
    "labels_record",
    "match_at_client",
    "model_hash",
    "report_sites",
    "site_model",
    "statistics_record",
    "to_arrays",
    "wanted_statistics",
]


def __getattr__(name: str) -> object:
    # Its import needs seconds: it imports transformers.
    if name == "PooledClassifier":
        from fedrot.strategies.pooled_classifier import PooledClassifier

        return PooledClassifier
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
