"""A command that is run until it loads torch: prints how torch's threads will wait, and ends.

``python -m tests.until_torch MODULE``
"""

import os
import runpy
import sys


class Watch:
    """Finder of modules that ends the process at the import of torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)


if __name__ == "__main__":
    sys.meta_path.insert(0, Watch())
    runpy.run_module(sys.argv[1], run_name="__main__")
