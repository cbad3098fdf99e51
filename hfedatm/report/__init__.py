"""The report: one HTML page per run or several runs, with everything inside it."""

from hfedatm.report.page import render, write_report

__all__ = ["render", "write_report"]
