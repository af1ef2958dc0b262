"""Where the checkout is, and the files beside it that some tests compare with."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # published instances; tests that need them are skipped elsewhere
