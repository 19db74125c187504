"""Looks for what is set up wrongly: ``check_store``, ``check_receiver`` and ``check_app``.

``oncekey doctor`` prints what these find. Each gives a ``Report`` with findings, each of them with
its severity, the evidence and a fix; what could not be looked at is listed too.
"""

from oncekey.doctor.apps import check_app
from oncekey.doctor.findings import Finding, Report, Severity
from oncekey.doctor.receivers import check_receiver
from oncekey.doctor.stores import check_store

__all__ = ["Finding", "Report", "Severity", "check_app", "check_receiver", "check_store"]
