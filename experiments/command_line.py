"""The command line of a script."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable
from pathlib import Path

INSTANCES_VARIABLE = "REMAT_INSTANCES"
_BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[2] / "shared" / "instances"

log = logging.getLogger(__name__)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose `--help` is the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_instances(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the folder of the published graphs.

    By default, that is the one that the environment variable names, or one beside the checkout.
    """
    parser.add_argument(
        "--instances",
        type=Path,
        default=Path(os.environ.get(INSTANCES_VARIABLE) or _BESIDE_THE_CHECKOUT),
        help=f"folder of the published graphs (or the variable {INSTANCES_VARIABLE})",
    )


def has_instances(folder: Path, names: Iterable[str]) -> bool:
    """Logs which of the published graphs are not in the folder; returns True if all are."""
    missing = sorted({name for name in names if not (folder / f"{name}.json").is_file()})
    if missing:
        log.error(
            "%s: no %s; give the folder of the published instances with --instances",
            folder,
            ", ".join(missing),
        )
    return not missing
