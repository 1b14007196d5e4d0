"""The speed room: what makes a loaded model fast, without the readable files knowing."""

from model.fast.prepare import accelerate

__all__ = ["accelerate"]
