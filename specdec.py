"""Names for Python programs: ``import specdec; specdec.load("tiny-llama").write("Hello").text``.

An installation has the whole project below this name (``setup.py``).
"""

__all__ = ("InputError", "Sample", "Session", "generate", "load")  # noqa: F822 - made when used


def __getattr__(name: str) -> object:
    """Return one of ``__all__``: torch, which takes seconds to load, is loaded only for them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # ``setup.py`` rewrites imports of this form alone, so a table of modules would not do.
    from app.sample import Sample
    from app.session import Session, load
    from generate import generate
    from model.errors import InputError

    return {each.__name__: each for each in (InputError, Sample, Session, generate, load)}[name]


def __dir__() -> list[str]:
    """Return the names above too, which help and completion show."""
    return sorted({*globals(), *__all__})


def main() -> int:
    """Run the command line of ``generate.py``; returns its exit status."""
    from app.common.command_line import start

    start()
    from generate import main

    return main()
