"""Messages about task heads: names of records and keys, and hashes of bodies.

A request has one of six stages: a client counts its rows, sums the features of its
training rows by class, evaluates task heads on its held-out rows, counts its training
rows by class, reports the figures of its site, or sums clipped features with noise.
"""

from __future__ import annotations

from fedrot.strategies.wire.arrays import model_hash
from fedrot.task_head.names import task_head_names
from fedrot.tensors import TensorDict, Tensors

#: The action of the requests, and their message type.
ACTION = "fedrot_sums"
MESSAGE_TYPE = f"query.{ACTION}"

#: Records of a request. A body and its task heads have these names with a place among
#: the request's bodies.
MODEL = "fedrot-model"
TASK_HEADS = "fedrot-heads"

#: In place of a body: what changed since the body before the round.
CHANGE = "fedrot-change"

#: Records of an answer: numbers of rows, sums of features, losses, or that the client
#: lacks a body.
ROWS = "fedrot-rows"
SUMS = "fedrot-class-sums"
LOSSES = "fedrot-losses"
LACKS = "fedrot-lacks"

#: Records of an answer of a site: counts of its rows by class; that it reports nothing;
#: and its figures and name.
COUNTS = "fedrot-counts"
WITHHELD = "fedrot-withheld"
FIGURES = "fedrot-figures"
SITE = "fedrot-site"

#: A record of a request for noisy sums: how rows are clipped. And of its answer.
PUBLIC = "fedrot-public"
NOISY_SUMS = "fedrot-noisy-sums"

#: A key of ``WITHHELD``, and why a site with an epsilon does not answer: it answers
#: requests for noisy sums alone, or its budget is spent.
REASON = "reason"
NOISE_ALONE = "noise-alone"
SPENT = "spent"

#: Keys of a request's configuration: the stage, the name of the task head (empty
#: evaluates the model itself) and the problem type.
STAGE = "fedrot-stage"
TASK_HEAD = "fedrot-task-head"
PROBLEM_TYPE = "fedrot-problem-type"

#: Further keys: hashes of the request's bodies, of all that the client shall keep, and
#: of those from which clients compute others: that before the round, then maybe the
#: one after it.
BODIES = "fedrot-bodies"
KEEP = "fedrot-keep"
PARENTS = "fedrot-parents"

#: A further key: shares of classes in the bias of the model.
PRIORS = "fedrot-priors"

#: The stages.
COUNT = "count"
SUM = "sum"
EVALUATE = "evaluate"
COUNT_CLASSES = "count-classes"
REPORT = "report"
NOISY_SUM = "noisy-sum"


def hash_of(tensors: Tensors, task_head: str) -> str:
    """Return the hash of a body: that of the model without the values of its head."""
    return model_hash(tensors, task_head_names(task_head))


def half_way(old: Tensors, new: Tensors) -> TensorDict:
    """Return the mean of two models; integers are those of the new one."""
    return {
        name: (old[name] + tensor) / 2 if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }
