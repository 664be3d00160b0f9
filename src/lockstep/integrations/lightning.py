"""LockstepStrategy: Lightning's DDP strategy with Lockstep's DistributedDataParallel. Needs the package ``lightning``."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.replicas.ddp import DistributedDataParallel

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(f"LockstepStrategy needs the package lightning ({error}). Install it: pip install lightning") from error


class LockstepStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not a dependency
    """A strategy for ``lightning.Trainer`` that averages gradients with ``lockstep.DistributedDataParallel``.

    Everything else is Lightning's ``DDPStrategy``: samplers, checkpoints, logging, ``validate``, ``test`` and ``predict``.

    Args:
        *args: Arguments of Lightning's ``DDPStrategy``.
        **kwargs: Arguments of Lightning's ``DDPStrategy``, and of ``lockstep.DistributedDataParallel``, for example ``timeout_s``.

    Example:
        In a script that torchrun, ``lockstep run`` or the ``Trainer`` itself starts on two workers::

            trainer = lightning.Trainer(devices=2, strategy=lockstep.integrations.lightning.LockstepStrategy())
            trainer.fit(model, loader)
    """

    strategy_name = "lockstep"
    model: Any

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def teardown(self) -> None:
        """End the replica of the model, so that the next ``fit`` can wrap the model anew. Called by the ``Trainer``."""
        wrapper = self.model
        if isinstance(wrapper, DistributedDataParallel):
            self.model = self.lightning_module
            wrapper.replica.close()
        super().teardown()
