"""A pytest plugin: it runs a share of the tests, adds a line when each begins and ends, and lets none stop the rest.

The process ends if the GPU no longer works, as after a fault in a kernel, or if a test runs too long.  The next run
with the same options skips the tests that were begun.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

from tests.gpu_report.processes import DEAD, add_line, lost_gpu, read_lines, slice_of

#: Maximum time of one test.
LONGEST_SECONDS = 100.0
#: This file runs first, in case time runs out: all other tests assume what it shows.
FIRST = "test_gpu.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=Path, help="add lines to this file")
    parser.addoption("--share", default="0/1", help="run every n-th test from the k-th on: k/n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Reporter(config.getoption("--report-to"), config.getoption("--share")))


class _Reporter:
    def __init__(self, results: Path, share: str) -> None:
        self.results, self.share = results, share
        self.outcome, self.message, self.seconds = "", "", 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        begun = {line["begun"] for line in read_lines(self.results) if "begun" in line}
        in_order = sorted(items, key=lambda item: item.path.name != FIRST)
        mine = in_order[slice_of(self.share)]
        add_line(self.results, part="tests", share=self.share, expected=len(mine))
        items[:] = [item for item in mine if item.nodeid not in begun]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        first = self.share.startswith("0/")  # every process sees the failure, one reports it
        if report.failed and first and all(line.get("name") != report.nodeid for line in read_lines(self.results)):
            self._add(report.nodeid, "failed", 0.0, report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        add_line(self.results, part="tests", share=self.share, begun=nodeid)
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True, file=sys.__stderr__)
        self.outcome, self.message, self.seconds = "passed", "", 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed or (report.skipped and self.outcome == "passed"):
            self.outcome = report.outcome
            self.message = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._add(nodeid, self.outcome, self.seconds, self.message)
        if self.outcome == "failed" and (failure := lost_gpu()):
            print(f"the GPU no longer works: {failure}", flush=True)
            os._exit(DEAD)  # fixtures that free memory of this GPU would only fail, one after the other

    def _add(self, name: str, outcome: str, seconds: float, message: str) -> None:
        add_line(self.results, part="tests", name=name, outcome=outcome, seconds=seconds, message=message[-3000:])
