"""Lightning: `Trainer(callbacks=[RematCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import remat
from remat.fit.optimizer_memory import bytes_to_keep_free


class RematCallback(Callback):
    """Plans the training step when training starts, and makes it plain again when it ends.

    Args:
        budget: of everything on the device, the optimizer's state included: bytes, "20GiB" or
            "60%". None for what the GPU has.
        module: the name of a module that `training_step` calls, such as "model" or "encoder.body",
            which is planned alone; needed where `training_step` runs the backward itself (manual
            optimization). All of `training_step` is planned if it is not given.
        **options: those of `remat.checkpoint`; `reserve_bytes` is what the optimizers hold, and
            `is_accumulating` what the trainer says, if they are not given.

    Attributes:
        planned: the planned function or module, for `remat.report`; None before training starts.
    """

    def __init__(
        self, budget: int | str | None = None, *, module: str | None = None, **options: Any
    ) -> None:
        self.budget, self.module, self.options = budget, module, options
        self.planned: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plans the step.

        Called by the trainer once model and optimizers are where they train.

        Raises:
            ValueError: there is no such module, or none was named and `training_step` runs the
                backward itself.
        """
        options = {
            "reserve_bytes": sum(
                bytes_to_keep_free(optimizer, of_card=self.budget is None)
                for optimizer in trainer.optimizers
            ),
            "is_accumulating": trainer.accumulate_grad_batches > 1,
            **self.options,
        }
        if self.module is not None:
            planned = self._named(pl_module, self.module)
            self.planned = remat.checkpoint(planned, self.budget, **options)
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimizes by itself, so training_step is no step "
                "that can be planned; name the module that it calls: module=..., one of "
                f"{_children(pl_module)}"
            )
        vars(pl_module).pop("training_step", None)  # of a training that was cut short
        self.planned = remat.checkpoint(pl_module.training_step, self.budget, **options)
        vars(pl_module)["training_step"] = self.planned

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the step plain again."""
        if self.module is not None:
            remat.unwrap(pl_module.get_submodule(self.module))
        else:
            vars(pl_module).pop("training_step", None)

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
