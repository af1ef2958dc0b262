"""Lightning: `Trainer(callbacks=[RematCallback("20GiB", module="model")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import remat
from remat.fit.optimizer_memory import state_bytes_of


class RematCallback(Callback):
    """Plans a module of a `LightningModule` when training starts, and makes it plain again when it
    ends.

    `training_step` itself logs and chooses, and stays as it is; the module that it calls is what
    takes the memory.

    Args:
        budget: of everything on the device, the optimizer's state included: bytes, "20GiB" or
            "60%".
        module: the name of the module that `training_step` calls, such as "model" or
            "encoder.body".
        **options: those of `remat.checkpoint`; `reserve_bytes` is what the optimizers hold, and
            `is_accumulating` what the trainer says, if they are not given.
    """

    def __init__(self, budget: int | str, *, module: str, **options: Any) -> None:
        self.budget, self.module, self.options = budget, module, options

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plans the module.

        Called by the trainer once model and optimizers are where they train.
        """
        try:
            planned = pl_module.get_submodule(self.module)
        except AttributeError as error:
            children = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise ValueError(
                f"{type(pl_module).__name__} has no module {self.module!r} to plan; it has: "
                f"{children}"
            ) from error
        held_bytes = sum(map(state_bytes_of, trainer.optimizers))
        remat.checkpoint(
            planned,
            self.budget,
            **{
                "reserve_bytes": held_bytes,
                "is_accumulating": trainer.accumulate_grad_batches > 1,
                **self.options,
            },
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the module plain again."""
        remat.unwrap(pl_module.get_submodule(self.module))
