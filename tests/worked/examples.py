"""The worked examples by id, from tests/data/worked_examples.json (each entry names its source and status)."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data" / "worked_examples.json"

EXAMPLES: dict[str, Any] = {entry["id"]: entry for entry in json.loads(_FILE.read_text(encoding="utf-8"))["examples"]}
