"""Hugging Face's `Trainer`: `Trainer(..., callbacks=[RematCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

import remat
from remat.fit.optimizer_memory import bytes_to_keep_free


class RematCallback(TrainerCallback):
    """Plans the model when training begins, and makes it plain again when it ends.

    Args:
        budget: of everything on the device, the optimizer's state included: bytes, "20GiB" or
            "60%". None for what the GPU has.
        trainer: whose `compute_loss` is planned, for a loss that is computed outside of the model:
            `trainer.add_callback(RematCallback("20GiB", trainer=trainer))`. The model alone if it
            is not given.
        **options: those of `remat.checkpoint`; `reserve_bytes` is what the optimizer holds, and
            `is_accumulating` what the trainer's arguments say, if they are not given.

    Attributes:
        planned: the planned model or function, for `remat.report`; None before training begins.
    """

    def __init__(
        self, budget: int | str | None = None, *, trainer: Trainer | None = None, **options: Any
    ) -> None:
        self.budget, self.trainer, self.options = budget, trainer, options
        self.planned: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plans the step; called by the trainer once model and optimizer are where they train."""
        optimizer = kwargs.get("optimizer")
        options = {
            "reserve_bytes": bytes_to_keep_free(optimizer, of_card=self.budget is None)
            if optimizer is not None
            else 0,
            "is_accumulating": args.gradient_accumulation_steps > 1,
            **self.options,
        }
        if self.trainer is None:
            self.planned = remat.checkpoint(kwargs["model"], self.budget, **options)
            return
        vars(self.trainer).pop("compute_loss", None)  # of a training that was cut short
        self.planned = remat.checkpoint(self.trainer.compute_loss, self.budget, **options)
        vars(self.trainer)["compute_loss"] = self.planned

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the step plain again."""
        if self.trainer is None:
            remat.unwrap(kwargs["model"])
        else:
            vars(self.trainer).pop("compute_loss", None)
