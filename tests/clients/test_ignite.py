"""PyTorch Ignite: engines, metrics, checkpoints and the collectives of idist over a group of the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained


def train(backend: str, folder: str) -> Trained:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events, create_supervised_evaluator
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import MeanSquaredError, RunningAverage

    dist.init_process_group(backend)
    losses: list[float] = []
    found: dict[str, Any] = {}

    def training(local_rank: int) -> None:
        # docs/clients.md: over other backends than torch's own it leaves the model alone
        assert isinstance(idist.auto_model(net()), DistributedDataParallel) == (backend == "gloo")
        loader = idist.auto_dataloader(rows(), batch_size=8, shuffle=False)
        model = DistributedDataParallel(net())
        optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.02))

        def step(engine: Engine, batch: Any) -> float:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            return losses[-1]

        trainer = Engine(step)
        RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")
        evaluator = create_supervised_evaluator(model, metrics={"error": MeanSquaredError()})

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate(engine: Engine) -> None:
            evaluator.run(loader)
            found[f"epoch {engine.state.epoch}"] = (
                evaluator.state.metrics["error"],
                engine.state.metrics["average"],
            )

        saver = DiskSaver(f"{folder}/{backend}", create_dir=True, require_empty=False)
        trainer.add_event_handler(Events.COMPLETED, Checkpoint({"model": model, "trainer": trainer}, saver))
        trainer.run(loader, max_epochs=2)
        found["weights"] = model.module.state_dict()

    with idist.Parallel() as parallel:
        parallel.run(training)
    rank = idist.get_rank()
    found["sum"] = idist.all_reduce(rank + 1.0)
    found["lengths"] = [len(text) for text in idist.all_gather("rank" * (rank + 1))]
    found["sent"] = idist.broadcast(torch.arange(3.0) if rank == 0 else None, src=0, safe_mode=True)
    idist.barrier()
    saved = next(Path(folder, backend).glob("checkpoint_*.pt"))
    found["saved"] = torch.load(saved, weights_only=True)["model"]
    result = trained(losses, found.pop("weights"), **found)
    idist.finalize()
    return result


def test_ignite_trains_evaluates_and_saves_as_over_gloo(clients: Clients, tmp_path: Path) -> None:
    assert_trains_as_over_gloo(clients("pytorch-ignite"), train, str(tmp_path))
