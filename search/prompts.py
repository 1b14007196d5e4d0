"""Built-in prompts by kind of task, since the speed of drafts depends on it.

Each is a user's turn of a chat; a model without a chat template continues it as text.
"""

import json
from pathlib import Path

PROMPTS: dict[str, list[str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
