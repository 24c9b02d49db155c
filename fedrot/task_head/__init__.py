"""Task heads: fitted in closed form to sums over clients' rows, and chosen by losses.

A task head is the last linear layer of a classifier. Clients send sums of its inputs
by class (``ClassSums``); the server adds them up, fits task heads of several
shrinkages, and takes the one with the smallest loss on rows that clients hold out.
"""

from fedrot.task_head.fit import (
    fitted_task_head,
    fitted_task_heads,
    with_task_head,
)
from fedrot.task_head.losses import (
    LossSums,
    TaskHeads,
    best_temperature,
    collect_losses,
    compare_losses,
    with_temperature,
)
from fedrot.task_head.names import adapter_task_head_of, task_head_of
from fedrot.task_head.outputs import problem_type_of
from fedrot.task_head.site_head import collect_counts, site_head, site_shift
from fedrot.task_head.sums import ClassSums, collect_classes

__all__ = [
    "ClassSums",
    "LossSums",
    "TaskHeads",
    "adapter_task_head_of",
    "best_temperature",
    "collect_classes",
    "collect_counts",
    "collect_losses",
    "compare_losses",
    "fitted_task_head",
    "fitted_task_heads",
    "problem_type_of",
    "site_head",
    "site_shift",
    "task_head_of",
    "with_task_head",
    "with_temperature",
]
