r"""Trains a GPT on several GPUs within a budget per GPU, with DDP or FSDP2.

It runs on a cluster unchanged.

One node of eight GPUs:
    torchrun --nproc-per-node 8 -m experiments.distributed_training --parallel fsdp --budget 60GiB \
        --layers 32 --width 4096 --length 4096 --vocabulary 32000 --batch 1
Two nodes (run this on each):
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m
    experiments.distributed_training ...
Without a GPU, to try it:
    torchrun --nproc-per-node 2 -m experiments.distributed_training

One call makes it train with a plan: `remat.checkpoint(...)` before the model is sharded or wrapped.
`--plain` leaves out this call, for comparison. The text is random; only memory and time matter.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.fit.optimizer_memory import optimizer_memory


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output; shape (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        fed: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + fed


class Head(nn.Module):
    """The last layer and the loss.

    It is planned and sharded like a block, because its logits take the most memory.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each next token."""
        return functional.cross_entropy(
            self.output(self.norm(x)).flatten(0, 1).float(), target.flatten()
        )


class GPT(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.head = Head(width, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each next token; `text` is (batch, length + 1) integers."""
        x = self.embed(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x, text[:, 1:])
        return loss


def arguments() -> argparse.Namespace:
    """Returns the options; the defaults run on two CPU cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="fsdp")
    parser.add_argument(
        "--budget",
        default="75%",
        help='per rank: bytes, "60GiB", or a percentage of keeping everything',
    )
    parser.add_argument("--plain", action="store_true", help="train without a plan")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="per rank")
    parser.add_argument("--steps", type=int, default=8)

    return parser.parse_args()


def parallel_model(asked: argparse.Namespace, device: torch.device) -> nn.Module:
    """Returns the model, planned and then sharded over all ranks, or copied to each."""
    torch.manual_seed(0)
    model = GPT(asked.layers, asked.width, asked.length, asked.vocabulary).to(device)

    ranks = dist.get_world_size() if asked.parallel == "fsdp" else 1
    state_bytes = (
        optimizer_memory("adamw", model.parameters(), device_type=device.type).state_bytes // ranks
    )

    if not asked.plain:
        costs = "profile" if device.type == "cuda" else "roofline"
        remat.checkpoint(
            model,
            asked.budget,
            blocks=[*model.blocks, model.head],
            reserve_bytes=state_bytes,
            costs=costs,
        )

    if asked.parallel == "ddp":
        return DistributedDataParallel(model)

    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if device.type == "cuda" else None, reduce_dtype=torch.float32
    )

    for block in [*model.blocks, model.head]:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def main() -> None:
    """Trains, and prints what each step took."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    train(arguments(), int(os.environ["RANK"]), device)
    # the model is freed by now: if DDP over gloo holds the group last, it can hang (torch 2.13)
    dist.destroy_process_group()


def train(asked: argparse.Namespace, rank: int, device: torch.device) -> None:
    """Builds the model and takes the steps; the model is freed when it returns."""
    model = parallel_model(asked, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    for step in range(asked.steps):
        start = time.perf_counter()
        text = torch.randint(
            asked.vocabulary, (asked.batch, asked.length + 1), generator=generator
        ).to(device)

        optimizer.zero_grad()
        loss = model(text)
        loss.backward()
        optimizer.step()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            peak = (
                f", peak {remat.format_bytes(torch.cuda.max_memory_allocated())}"
                if device.type == "cuda"
                else ""
            )
            print(
                f"step {step}: loss {total.item() / dist.get_world_size():.6f}, "
                f"{time.perf_counter() - start:.3f} s{peak}",
                flush=True,
            )

    if rank == 0 and not asked.plain:
        print(remat.report(model))


if __name__ == "__main__":
    main()
