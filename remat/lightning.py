"""Lightning: `Trainer(callbacks=[RematCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import remat
from remat.face.step_function import make_plain
from remat.fit.optimizer_memory import bytes_to_keep_free


class RematCallback(Callback):
    """Plans the training step when training starts, and restores it when training ends.

    Args:
        budget: for everything on the device, including the optimizers' state: bytes, "20GiB" or
            "60%"; None for the memory that the GPU has.
        module: the name of a module that `training_step` calls, such as "model" or "encoder.body",
            to plan only this module; required if `training_step` runs the backward itself (manual
            optimization). If None, all of `training_step` is planned.
        **options: those of `remat.checkpoint`. By default `reserve_bytes` is the size of the
            optimizers' state (without a budget, only of the state that does not exist yet), and
            `is_accumulating` follows the trainer's arguments.

    Attributes:
        planned: the planned function or module, for `remat.report`; None before training starts.
    """

    def __init__(
        self, budget: int | str | None = None, *, module: str | None = None, **options: Any
    ) -> None:
        self.budget, self.module, self.options = budget, module, options
        self.planned: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plans the step; the trainer calls this after it has placed model and optimizers.

        Raises:
            ValueError: there is no module of that name, or no module was named and `training_step`
                runs the backward itself.
        """
        options = {"is_accumulating": trainer.accumulate_grad_batches > 1, **self.options}
        if "reserve_bytes" not in options:
            options["reserve_bytes"] = sum(
                bytes_to_keep_free(optimizer, of_card=self.budget is None)
                for optimizer in trainer.optimizers
            )

        if self.module is not None:
            planned = self._named(pl_module, self.module)
            self.planned = remat.checkpoint(planned, self.budget, **options)
            return

        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} uses manual optimization, so its training_step can't "
                "be planned as a whole; name a module that it calls with module=..., one of "
                f"{_children(pl_module)}"
            )

        self.planned = remat.checkpoint(pl_module.training_step, self.budget, **options)
        vars(pl_module)["training_step"] = self.planned

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the plain step."""
        if self.module is not None:
            remat.unwrap(pl_module.get_submodule(self.module))
        else:
            make_plain(pl_module, "training_step")

    @staticmethod
    def _named(pl_module: LightningModule, name: str) -> Any:
        try:
            return pl_module.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"{type(pl_module).__name__} has no module {name!r} to plan; it has: "
                f"{_children(pl_module)}"
            ) from error


def _children(pl_module: LightningModule) -> str:
    return ", ".join(name for name, _ in pl_module.named_children()) or "none"
