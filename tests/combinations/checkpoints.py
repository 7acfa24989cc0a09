"""Trainings that are saved at some degrees after their first step, and go on at others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import smdistributed.modelparallel.torch as smp
from tests.combinations.training import STEPS, Job, Trained, alone
from tests.combinations.ways import Degrees

__all__ = ["KINDS", "SAVED_AFTER", "rest_of", "resumed", "saved"]

SAVED_AFTER = 1  # steps
KINDS = {"parts": True, "whole": False}  # whether a file of each rank of a replica, or one of the whole


def saved(name: str, precision: str, degrees: Degrees, folder: Path) -> None:
    """On all ranks of a job: train, and save in parts and as a whole."""
    job = Job(name, precision, degrees)
    job.train(range(SAVED_AFTER))
    for kind, partial in KINDS.items():
        smp.save_checkpoint(
            str(folder),
            kind,
            partial=partial,
            model=job.model,
            optimizer=job.optimizer,
            user_content={"steps": SAVED_AFTER},
        )
    smp.barrier()


def resumed(name: str, precision: str, degrees: Degrees, folder: Path, kind: str) -> Trained:
    """On all ranks of a job: go on from what is there to the last step."""
    job = Job(name, precision, degrees)
    content = smp.resume_from_checkpoint(str(folder), kind, partial=KINDS[kind])
    job.train(range(content["steps"], STEPS))
    return Trained(job.losses, job.norms, {}, job.parameters())


def rest_of(name: str, precision: str) -> Trained:
    """What one process does in these steps, undisturbed."""
    whole = alone(name, precision)
    return replace(whole, losses=whole.losses[SAVED_AFTER:], norms=whole.norms[SAVED_AFTER:], gradients={})
