"""The command line of a script."""

from __future__ import annotations

import argparse


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose `--help` is the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
