"""Prints a pip constraints file that pins every dependency of the package and of its tests to the lowest version that pyproject.toml
supports. Needs Python 3.11 and the package `packaging`."""

from __future__ import annotations

import pathlib
import tomllib

from packaging.requirements import Requirement


def floors(names: list[str], extras: dict[str, list[str]]) -> dict[str, str]:
    """The lowest version of each requirement; an extra of this package stands for what it lists."""
    found: dict[str, str] = {}
    for requirement in map(Requirement, names):
        if requirement.extras:
            for extra in requirement.extras:
                found |= floors(extras[extra], extras)
            continue
        (found[requirement.name],) = [part.version for part in requirement.specifier if part.operator == ">="]
    return found


project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for name, version in sorted(floors(project["dependencies"] + extras["test"], extras).items()):
    print(f"{name}=={version}")
