"""What everything costs on this machine, beside other libraries: ``python -m benchmark``."""

from typing import Any

Report = dict[str, Any]  # what --json writes; the tables and the picture are made from it
