"""Checks of a user's own loss, pipeline and loop, before a long run begins."""

from jaxdp.checks.findings import Checked, Finding
from jaxdp.checks.front import check
from jaxdp.checks.loop import check_loop

__all__ = ["Checked", "Finding", "check", "check_loop"]
