"""Trainer to real engines: a PyTorch model is trained, and every few steps running vLLM engines get its weights.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enforce-eager --weight-transfer-config '{"backend": "tensorcast"}'
    PYTHONPATH=scripts .venv/bin/python -m examples.rollouts unix:/run/tensorcast/worker.sock --model MODEL \
        --engine http://127.0.0.1:8000 --steps 6 --every 2

Each version is published once, and only the tensors that have changed move. An engine takes it between two requests: those that
run are waited for, KV of former weights is never used again, and engines with the same version share KV.
"""

import argparse
import asyncio
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import tensorcast_connector as tensorcast
from examples.running import POLICY, RunningEngine

BATCH, TOKENS, LEARNING_RATE = 2, 64, 1e-3


class Trainer:
    """Next-token training on random text: what is learnt is of no use, but the weights change as in any training."""

    def __init__(self, folder: Path, layers: int | None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if layers is not None:
            trained = self.model.model.layers[len(self.model.model.layers) - layers :]
            self.model.requires_grad_(False)
            trained.requires_grad_(True)
        self._chance = torch.Generator().manual_seed(0)
        wanted = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(wanted, lr=LEARNING_RATE)

    def step(self) -> float:
        """One step; the loss before it."""
        text = torch.randint(self.model.config.vocab_size, (BATCH, TOKENS), generator=self._chance)
        loss = self.model(input_ids=text, labels=text).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        """In the precision in which they are served."""
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.model.named_parameters()}

    def save(self, source: Path, folder: Path) -> None:
        """What was published last, as a checkpoint that an engine can be started from."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        for each in source.iterdir():
            if not (folder / each.name).exists():
                shutil.copy(each, folder / each.name)


async def train(trainer: Trainer, worker: str, engines: list[RunningEngine], steps: int, every: int) -> int:
    """All steps; returns how many versions all engines have served."""
    served = 0
    async with await tensorcast.connect(worker) as session:
        publisher = tensorcast.WeightPublisher(session, POLICY)
        for step in range(1, steps + 1):
            loss = await asyncio.to_thread(trainer.step)
            if step % every:
                continue
            published = await publisher.publish(trainer.weights(), version=step)
            print(
                f"step {step}: loss {loss:.3f}, version {published.version} moved "
                f"{published.moved_bytes / 1e6:.1f} of {published.bytes / 1e6:.1f} MB"
            )
            if not served:
                await asyncio.gather(*(asyncio.to_thread(each.attach) for each in engines))
            await asyncio.gather(*(each.bring(step) for each in engines))
            await asyncio.gather(*(asyncio.to_thread(each.update, step) for each in engines))
            served += 1
    return served


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "worker", metavar="unix:PATH", help="socket of the trainer's worker, as `tensorcast up` prints it"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the checkpoint that the engines were started from"
    )
    parser.add_argument(
        "--engine", action="append", required=True, help="URL of an engine; with several, give it several times"
    )
    parser.add_argument(
        "--engine-worker", action="append", help="socket of its host's worker, if it is not the trainer's"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2, help="steps between two versions")
    parser.add_argument("--layers", type=int, help="train the last layers only: the others do not move")
    parser.add_argument("--save", type=Path, help="write what was published last to this folder")
    options = parser.parse_args()
    workers = options.engine_worker or [options.worker] * len(options.engine)
    engines = [RunningEngine(url, worker) for url, worker in zip(options.engine, workers, strict=True)]
    trainer = Trainer(options.model, options.layers)
    served = asyncio.run(train(trainer, options.worker, engines, options.steps, options.every))
    if options.save:
        trainer.save(options.model, options.save)
    print(f"{served} of {options.steps // options.every} versions were served by {len(engines)} engines")


if __name__ == "__main__":
    main()
