"""Test-time adaptation methods by name, one file each."""

from __future__ import annotations

from tesla_med.tta.base import METHODS, MethodContext, MethodParams, TTAMethod, make_method

__all__ = ["METHODS", "MethodContext", "MethodParams", "TTAMethod", "make_method"]
