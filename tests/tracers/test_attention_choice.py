"""The attention kernel of a card is the one that PyTorch chooses there, by card and version."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from remat.tracers.attention_choice import Attention, chosen_kernel
from remat.tracers.devices import device as device_named
from tests.support.checkout import ROOT

NAMES = ("math", "flash", "efficient", "cudnn")  # in the order of torch's numbers
FACTS = (ROOT / "experiments" / "results" / "gpu_run.jsonl").read_text().splitlines()
CHOICES = [fact for fact in map(json.loads, FACTS) if "bool mask" in fact]
assert len(CHOICES) == 21, "three types in seven widths"
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("fact", CHOICES, ids=lambda fact: f"{fact['dtype']}-{fact['width']}")
def test_the_kernel_is_the_one_that_an_h100_chose(fact: dict[str, Any]) -> None:
    dtype: torch.dtype = getattr(torch, fact["dtype"].removeprefix("torch."))
    query = torch.zeros(2, 4, 64, fact["width"], dtype=dtype)
    mask = torch.zeros(2, 1, 64, 64, dtype=dtype)
    plain = Attention(9.0, query, query, query, version=(2, 11))

    cases = {
        "plain": plain,
        "causal": plain._replace(is_causal=True),
        "dropout": plain._replace(dropout_p=0.1),
        "mask": plain._replace(mask=mask),
        "bool mask": plain._replace(mask=mask.bool()),
        "mask, dropout": plain._replace(mask=mask, dropout_p=0.1),
        "grouped": plain._replace(key=query[:, :2], value=query[:, :2], enable_gqa=True),
    }
    assert {name: chosen_kernel(case) for name, case in cases.items()} == {
        name: NAMES[fact[name]] for name in cases
    }


def call(
    device: str,
    *,
    dtype: torch.dtype = BRAIN,
    widths: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (32, 32),
    mask: tuple[int, ...] = (),
    is_trained: bool = True,
    **options: Any,
) -> Attention:
    """A call of attention; `widths` of query and value, `heads` and `lengths` of query and key."""
    on_meta: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    return Attention(
        device_named(device).capability,
        torch.empty(2, heads[0], lengths[0], widths[0], requires_grad=is_trained, **on_meta),
        torch.empty(2, heads[1], lengths[1], widths[0], **on_meta),
        torch.empty(2, heads[1], lengths[1], widths[1], **on_meta),
        torch.empty(mask, **on_meta) if mask else None,
        **options,
    )


# name -> the call, and the kernels with torch 2.11, 2.12, 2.14 and 2.15
TABLE: dict[str, tuple[Attention, str]] = {
    "dropout of a sixteenth": (call("H100", dropout_p=0.0625), "cudnn cudnn cudnn cudnn"),
    "dropout": (call("H100", dropout_p=0.1), "cudnn flash flash flash"),
    "dropout and a mask": (
        call("H100", dropout_p=0.1, mask=(32, 32)), "cudnn efficient efficient efficient",
    ),
    "160": (call("H100", widths=(160, 160)), "cudnn cudnn flash flash"),
    "160, not trained": (
        call("H100", widths=(160, 160), is_trained=False), "cudnn cudnn cudnn cudnn",
    ),
    "192 and 128": (call("H100", widths=(192, 128)), "cudnn cudnn cudnn cudnn"),
    "256": (call("H100", widths=(256, 256)), "cudnn cudnn cudnn cudnn"),
    "192 and 128 on Blackwell": (call("B200", widths=(192, 128)), "cudnn cudnn cudnn cudnn"),
    "256 on Blackwell": (call("B200", widths=(256, 256)), "flash flash cudnn cudnn"),
    "one query on Blackwell": (call("B200", lengths=(1, 32)), "cudnn cudnn flash cudnn"),
    "one query": (call("H100", lengths=(1, 32)), "cudnn cudnn cudnn cudnn"),
    "one query, dropout": (
        call("H100", lengths=(1, 32), dropout_p=0.5), "flash flash flash flash",
    ),
    "one key": (call("H100", lengths=(32, 1)), "flash flash flash flash"),
    "no key": (call("H100", lengths=(32, 0)), "math math math math"),
    "mask of three dimensions": (
        call("H100", mask=(4, 32, 32)), "efficient efficient efficient efficient",
    ),
    "grouped": (call("H100", heads=(4, 2), enable_gqa=True), "cudnn cudnn cudnn cudnn"),
    "grouped, float32": (
        call("H100", heads=(4, 2), enable_gqa=True, dtype=FLOAT), "math math efficient efficient",
    ),
    "one head of keys": (call("H100", heads=(4, 1)), "math math cudnn cudnn"),
    "many heads": (call("A100", heads=(65536, 65536)), "flash flash flash efficient"),
    "many heads on Hopper": (call("H100", heads=(65536, 65536)), "cudnn cudnn flash efficient"),
    "wider values": (call("A100", widths=(64, 128)), "efficient efficient efficient efficient"),
    "padded": (call("A100", widths=(60, 60)), "flash flash flash flash"),
    "not padded with a mask": (call("A100", widths=(60, 60), mask=(32, 32)), "math math math math"),
    "padded on Hopper": (call("H100", widths=(60, 60)), "flash flash flash flash"),
    "causal": (call("A100", is_causal=True), "flash flash flash flash"),
    "causal, not square": (
        call("A100", lengths=(16, 32), is_causal=True), "efficient efficient efficient efficient",
    ),
    "float32": (call("A100", dtype=FLOAT), "efficient efficient efficient efficient"),
    "float32 of width 62": (call("A100", dtype=FLOAT, widths=(62, 62)), "math math math math"),
    "float32 of width 62 on Turing": (
        call("T4", dtype=FLOAT, widths=(62, 62)), "efficient efficient efficient efficient",
    ),
    "float16 on Turing": (call("T4", dtype=HALF), "efficient efficient efficient efficient"),
    "bfloat16 on Turing": (call("T4"), "math math math math"),
    "200 on Ada": (call("L4", widths=(200, 200)), "efficient efficient efficient efficient"),
    "200 on Ada, not trained": (
        call("L4", widths=(200, 200), is_trained=False), "flash flash flash flash",
    ),
    "256 on Ada": (call("L4", widths=(256, 256)), "flash flash flash flash"),
    "256 on Ada, dropout": (
        call("A10", widths=(256, 256), dropout_p=0.1), "efficient efficient efficient efficient",
    ),
    "float64": (call("H100", dtype=torch.float64), "math math math math"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_kernel_follows_torchs_rules_of_that_version(name: str) -> None:
    given, kernels = TABLE[name]
    versions = [(2, 11), (2, 12), (2, 14), (2, 15)]
    found = [chosen_kernel(given._replace(version=version)) for version in versions]
    assert found == kernels.split()
    assert chosen_kernel(given._replace(version=(2, 13))) == found[1], "counts as 2.12"


def test_rows_with_gaps_are_for_the_math_kernel() -> None:
    given = call("H100")
    assert chosen_kernel(given._replace(key=given.key.transpose(2, 3).contiguous().mT)) == "math"


def test_inputs_without_a_batch_get_one_from_2_14_on() -> None:
    one = torch.empty(4, 32, 64, dtype=HALF, device="meta")
    given = Attention(8.0, one, one, one)
    found = [chosen_kernel(given._replace(version=version)) for version in ((2, 12), (2, 14))]
    assert found == ["math", "flash"]


def test_a_call_that_no_enabled_kernel_can_run_is_refused() -> None:
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    with torch.nn.attention.sdpa_kernel(backend), pytest.raises(RuntimeError, match="are flash"):
        chosen_kernel(call("T4"))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert chosen_kernel(call("A100")) == "cudnn"
