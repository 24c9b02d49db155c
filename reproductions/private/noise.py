"""Task heads from sums with noise.

The unit of the guarantee is a row. An epsilon of 0 stands for no noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.simulations.tasks.scores import evaluate_predictions
from fedrot.strategies import Privacy
from fedrot.strategies.client.ledger import release_of
from fedrot.task_head.noisy.noisy_fit import fit_to_noisy_sums
from fedrot.task_head.noisy.noisy_sums import noisy_sums
from fedrot.task_head.noisy.public_features import public_features
from reproductions.heads.closed import scores
from reproductions.private.membership import texts_features

#: Data sets, and the one whose training texts are public beside each.
SETS = {
    "dair_emotion": "crowdflower",
    "crowdflower": "goemotions",
    "goemotions": "crowdflower",
    "sst2": "crowdflower",
}
#: Training rows, test rows and public rows of a data set, where there are as many.
DRAWN, TESTED, PUBLIC = 10_000, 2000, 4000
#: Sites, and rows of each. GoEmotions' 6,000 rows are 120 for each of 50 sites.
DIVISIONS, SEEDS = ((8, 150), (8, 750), (50, 150)), range(11, 16)
EPSILONS, MEASURES = (8.0, 4.0, 2.0, 1.0, 0.0), ("accuracy", "macro_f1", "ece")


class Identity(nn.ModuleDict):
    """A classifier whose features are its inputs."""

    def forward(self, features: Tensor, labels: Any = None) -> SimpleNamespace:
        return SimpleNamespace(logits=self["classifier"](features))


@cache
def multiplier_of(epsilon: float) -> float:
    """Return the noise of one answer, as a site's ledger has it."""
    return (
        epsilon and release_of(Privacy(epsilon=epsilon, record="/-"), [])["multiplier"]
    )


def rows_of(folder: Path, layers: str = "last") -> Iterator[dict[str, Any]]:
    """Yield what heads are worth, by the ``noises`` that are added to the sums: one at
    each site, or one in all. They read these layers.
    """
    texts = {name: texts_features(folder, name, DRAWN, TESTED, layers) for name in SETS}
    for name, seed, (sites, rows) in product(SETS, SEEDS, DIVISIONS):
        features, labels, training = texts[name]
        layer = nn.Linear(features.shape[1], int(labels.max()) + 1).double()
        model = Identity({"classifier": layer})
        others = [{"features": texts[SETS[name]][0][:PUBLIC]}]
        public = public_features(model, others, "classifier")
        torch.manual_seed(seed)
        own = torch.randperm(training)[: sites * rows]
        batch = {"features": features[own], "labels": labels[own]}
        asked = partial(
            noisy_sums,
            model,
            [batch],
            "classifier",
            public.clipping,
            draw=partial(torch.randn, dtype=torch.float64),
        )
        for epsilon, noises in product(EPSILONS, (sites, 1)):
            # So many answers have together the noise of one with more.
            sums = asked(noises**0.5 * multiplier_of(epsilon))
            head = fit_to_noisy_sums(sums, public)[:2]
            logits = scores(features[training:], head).numpy()
            yield {
                "data": name,
                "read": layers,
                "sites": sites,
                "rows": len(own) // sites,
                "seed": seed,
                "noises": noises,
                "epsilon": epsilon,
                **evaluate_predictions(
                    "single", MEASURES, logits, labels[training:].numpy()
                ),
            }
