"""Hugging Face's `Trainer`: `Trainer(..., callbacks=[RematCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

import remat
from remat.face.step_function import make_plain
from remat.fit.optimizer_memory import bytes_to_keep_free


class RematCallback(TrainerCallback):
    """Plans the model when training begins, and restores it when training ends.

    Args:
        budget: for everything on the device, including the optimizer's state: bytes, "20GiB" or
            "60%"; None for the memory that the GPU has.
        trainer: plans this trainer's `compute_loss`, for a loss that is computed outside of the
            model: `trainer.add_callback(RematCallback("20GiB", trainer=trainer))`. If None, only
            the model is planned.
        **options: those of `remat.checkpoint`. By default `reserve_bytes` is the size of the
            optimizer's state (without a budget, only of the state that does not exist yet), and
            `is_accumulating` follows the trainer's arguments.

    Attributes:
        planned: the planned model or function, for `remat.report`; None before training begins.
    """

    def __init__(
        self, budget: int | str | None = None, *, trainer: Trainer | None = None, **options: Any
    ) -> None:
        self.budget, self.trainer, self.options = budget, trainer, options
        self.planned: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plans the step; the trainer calls this after it has placed model and optimizer.

        Raises:
            ValueError: the trainer uses `nn.DataParallel`.
        """
        if args.n_gpu > 1:
            raise ValueError(
                f"the trainer runs the model on {args.n_gpu} GPUs of one process through "
                "nn.DataParallel, which copies the module at every step, its plan included; start "
                "one process per GPU (torchrun, accelerate launch), or make one GPU visible"
            )

        optimizer = kwargs.get("optimizer")
        options = {"is_accumulating": args.gradient_accumulation_steps > 1, **self.options}
        if optimizer is not None and "reserve_bytes" not in options:
            is_of_card = self.budget is None
            options["reserve_bytes"] = bytes_to_keep_free(optimizer, of_card=is_of_card)

        if self.trainer is None:
            self.planned = remat.checkpoint(kwargs["model"], self.budget, **options)
            return

        self.planned = remat.checkpoint(self.trainer.compute_loss, self.budget, **options)
        vars(self.trainer)["compute_loss"] = self.planned

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores the plain step."""
        if self.trainer is None:
            remat.unwrap(kwargs["model"])
        else:
            make_plain(self.trainer, "compute_loss")
