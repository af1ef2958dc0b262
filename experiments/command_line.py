"""The command line of a script."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

INSTANCES_VARIABLE = "REMAT_INSTANCES"
_BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[2] / "shared" / "instances"

log = logging.getLogger(__name__)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose `--help` is the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_names(parser: argparse.ArgumentParser, known: Collection[str], metavar: str) -> None:
    """Adds `names`: any of the known ones, all of them if none is given.

    argparse's `choices` can't do this: Python 3.11 looks for the default among them.
    """

    def name(word: str) -> str:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return word

    parser.add_argument("names", nargs="*", type=name, default=tuple(known), metavar=metavar)


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
