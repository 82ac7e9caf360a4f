"""Trying an import: the one place where a package may be broken in any way without ending the check-up."""

from __future__ import annotations

import functools
import importlib
import warnings


@functools.cache
def import_problem(module: str) -> str | None:
    """Why a module cannot be imported, in one line; None where it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # a broken package raises what it likes
        return describe(error)
    return None


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
