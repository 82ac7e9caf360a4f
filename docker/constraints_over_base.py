"""Constraints for pip over a base image: what is installed stays, and our pins hold for the rest.

Usage: python docker/constraints_over_base.py constraints.txt > merged.txt
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normal(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


installed = {normal(each.name): each.version for each in distributions() if each.name}
pins = [line.partition("#")[0].strip() for line in Path(sys.argv[1]).read_text().splitlines()]
ours = {normal(pin.split("==")[0]): pin for pin in pins if pin}
kept = [f"{name}=={version}" for name, version in sorted(installed.items())]
added = [pin for name, pin in sorted(ours.items()) if name not in installed]
sys.stdout.write("\n".join([*kept, *added]) + "\n")
