"""Hugging Face's `Trainer`: `Trainer(..., callbacks=[RematCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

import remat
from remat.fit.optimizer_memory import state_bytes_of


class RematCallback(TrainerCallback):
    """Plans the model when training begins, and makes it plain again when it ends.

    Args:
        budget: of everything on the device, the optimizer's state included: bytes, "20GiB" or
            "60%".
        **options: those of `remat.checkpoint`; `reserve_bytes` is what the optimizer holds, and
            `is_accumulating` what the trainer's arguments say, if they are not given.
    """

    def __init__(self, budget: int | str, **options: Any) -> None:
        self.budget, self.options = budget, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plans the model; called by the trainer once model and optimizer are where they train."""
        optimizer = kwargs.get("optimizer")
        held_bytes = state_bytes_of(optimizer) if optimizer is not None else 0
        remat.checkpoint(
            kwargs["model"],
            self.budget,
            **{
                "reserve_bytes": held_bytes,
                "is_accumulating": args.gradient_accumulation_steps > 1,
                **self.options,
            },
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the model plain again."""
        remat.unwrap(kwargs["model"])
