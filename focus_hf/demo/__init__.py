"""The whole story on this machine: train centroids, push, load back, generate. Needs no network and no account."""

from .run import run_demo

__all__ = ["run_demo"]
