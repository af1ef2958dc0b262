"""Private names of Inductor's settings for passes: the user's run first, then ours.

Supported: torch 2.11 to 2.15; each name below was checked with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def taken_settings() -> list[str]:
    """Returns the names of Inductor's settings, among those set, that decide what a plan decides.

    Checked with 2.13.
    """
    from torch._inductor import config

    names = ("custom_partitioner_fn", "_post_fusion_custom_pass")
    return [name for name in names if getattr(config, name, None) is not None]


def users(setting: Any) -> list[Any]:
    """Returns the user's passes of one kind; a setting may be a list of them (2.13)."""
    if setting is None:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]


def run_after(passes: Sequence[Any], own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a pass that runs the user's passes, then `own`, which has to see their result."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())  # 2.13

    def run(argument: Any) -> Any:
        for each in passes:
            made = each(argument, is_inference=False) if isinstance(each, aware) else each(argument)
            argument = made if isinstance(made, list) else argument  # graphs change in place
        return own(argument)

    return run


def key_beside(key: str, passes: Sequence[Any]) -> str | None:
    """Returns the key with those of the user's passes.

    It is None if one has no key: Inductor then caches nothing.
    """
    keys = [each.uuid() if hasattr(each, "uuid") else None for each in passes]
    if not keys:
        return key
    return None if any(each is None for each in keys) else f"{key} {keys!r}"


def named(base: Any, run: Callable[[Any], Any], key: str | None) -> Any:
    """Returns a pass in the form that Inductor expects, with its key for Inductor's cache."""

    class Pass(base):  # type: ignore[misc]  # of either kind
        def __call__(self, argument: Any) -> Any:
            return run(argument)

        def uuid(self) -> str | None:
            return key

        def __reduce__(self) -> Any:  # it is part of the settings, which are pickled for the key
            return str, (key,)

    return Pass()
