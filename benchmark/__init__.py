"""What everything costs on this machine, beside other libraries: ``python -m benchmark``."""

from typing import Any

import model  # noqa: F401 - first of all: it says how torch's threads wait

Report = dict[str, Any]  # what --json writes; the tables and the picture are made from it
