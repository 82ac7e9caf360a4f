"""Whether what is installed is what the package asks for, and can be imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gnmr_megatron import __version__
from gnmr_megatron.training.checkup.findings import VERSIONS, Finding
from gnmr_megatron.training.checkup.imports import import_problem

PACKAGE = "gnmr-megatron"
# where a module is not called as its package, with "_" for "-"
MODULES = {
    "megatron-core": "megatron.core",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "transformer-engine": "transformer_engine.pytorch",
}


def check_versions(*, needs_te: bool) -> Iterator[Finding]:
    """Python and every requirement of the package, its bounds as the installed metadata has them.

    Args:
        needs_te: whether Transformer Engine is required, too.
    """
    yield VERSIONS.ok(PACKAGE, __version__)
    try:
        metadata = distribution(PACKAGE)
    except PackageNotFoundError:
        yield VERSIONS.problem(
            PACKAGE, "is not installed, so what it requires is not known", "pip install -e ."
        )
        return
    yield _python(metadata.metadata["Requires-Python"])
    for line in metadata.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield check_requirement(requirement)
        elif requirement.name == "transformer-engine":
            yield _transformer_engine(requirement, is_needed=needs_te)


def check_requirement(requirement: Requirement) -> Finding:
    """Whether one requirement is there, within its bounds, and can be imported."""
    name, bounds = requirement.name, str(requirement.specifier)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    install = f"pip install '{name}{extras}{bounds}'"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return VERSIONS.problem(name, f"is not installed; {bounds} is needed", install)
    if not requirement.specifier.contains(installed, prereleases=True):
        return VERSIONS.problem(name, f"{installed} is installed; {bounds} is needed", install)
    problem = import_problem(MODULES.get(name.lower(), name.replace("-", "_")))
    if problem is not None:
        return VERSIONS.problem(
            name,
            f"{installed} is installed, but cannot be imported: {problem}",
            install.replace("install", "install --force-reinstall", 1),
        )
    return VERSIONS.ok(name, f"{installed} (needs {bounds})")


def _python(bounds: str) -> Finding:
    running = platform.python_version()
    if SpecifierSet(bounds).contains(running, prereleases=True):
        return VERSIONS.ok("python", f"{running} (needs {bounds})")
    return VERSIONS.problem(
        "python",
        f"{running} is running; {bounds} is needed",
        "make an environment with a newer one",
    )


def _transformer_engine(requirement: Requirement, *, is_needed: bool) -> Finding:
    try:
        version(requirement.name)
    except PackageNotFoundError:
        if not is_needed:
            return VERSIONS.not_applicable(
                requirement.name, "is not installed; only te_* paths need it"
            )
    return check_requirement(requirement)
