"""Trackers for ``Run(track=...)``: where the averages of logged values go. No package is loaded before it is used.

Example:
    >>> run = lockstep.Run(model, opt, track=["csv", lockstep.track.TensorBoard("runs/small")])
"""

from lockstep.observe.tracker_csv import Csv
from lockstep.observe.tracker_mlflow import Mlflow
from lockstep.observe.tracker_tensorboard import TensorBoard
from lockstep.observe.tracker_wandb import Wandb
from lockstep.observe.trackers import Tracker

__all__ = ["Csv", "Mlflow", "TensorBoard", "Tracker", "Wandb"]
