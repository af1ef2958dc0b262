"""Tracers: a model in, a graph with costs and sizes out."""

from __future__ import annotations

if __name__ == "tracers":  # imported by the folder's name, from a checkout
    from remat.checkout import alias

    alias(__name__)
