"""The speed room: what makes a loaded model fast, without the readable files knowing."""

from model.fast.parts import accelerate

__all__ = ["accelerate"]
