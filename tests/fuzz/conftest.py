"""Says how many cases a fuzzing run tried."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("fuzzing")
        for name, count in COUNTS.items():
            terminalreporter.write_line(f"{count:>9,} cases  {name}")
        terminalreporter.write_line(f"{sum(COUNTS.values()):>9,} cases  in all")
