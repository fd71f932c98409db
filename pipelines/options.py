"""Options that commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from pydantic import JsonValue

HOME = Path(".assay")

Where = Annotated[Path, Parameter(name="--home", env_var="ASSAY_HOME", help="Folder that everything is written to.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]


def print_json(value: JsonValue) -> None:
    """What a command prints if asked for JSON."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
