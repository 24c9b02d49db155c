"""What each site gains: priors on their way, reports of sites, and who is left out."""

from __future__ import annotations

import pytest

from fedrot.strategies import report_sites
from tests.strategies.fakes import grid_of, tensors_of
from tests.strategies.fitting.site_cases import (
    CASES,
    alone_logits,
    arrays_of,
    figures_of,
    labels_of,
    logits_of,
    own_shift,
    pooled_priors,
    sites_of,
)
from tests.models import near


@pytest.mark.parametrize("name", CASES)
def test_a_site_reports_what_a_slow_oracle_counts(name, warnings, tmp_path):
    kind = CASES[name]
    sites = sites_of(kind)
    first = kind.state()
    final = near(first, 0.2, 1)
    from flwr.app import ArrayRecord

    config = kind.build().config if kind.adapter else kind.config
    found = report_sites(
        grid_of([site.node(tmp_path) for site in sites]),
        ArrayRecord(final),
        kind.config,
        first=ArrayRecord(first),
        timeout=1,
    )
    assert warnings() == ""
    priors = pooled_priors(sites)
    assert len(found.rows) == 3
    for site, row in zip(sites, found.rows, strict=True):
        labels = labels_of(site.test)
        whole = logits_of(kind, final, site.test)
        shift = own_shift(site, priors, logits_of(kind, final, site.training))
        answers = {
            "global": whole,
            "own": whole + shift,
            "alone": alone_logits(site, first, site.test),
        }
        for head, logits in answers.items():
            expected = figures_of(kind, logits, labels)
            assert row[head] == pytest.approx(expected, rel=1e-4), head
