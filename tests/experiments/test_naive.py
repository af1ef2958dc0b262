"""The mistakes that `experiments.naive` makes on purpose can still be made in the source."""

from __future__ import annotations

import pytest

from experiments.naive import ALL, ROOT, Naive


@pytest.mark.parametrize("naive", ALL, ids=lambda naive: naive.name)
def test_a_mistake_can_still_be_made(naive: Naive) -> None:
    source = (ROOT / naive.path).read_text()
    assert [source.count(before) for before, _ in naive.edits] == [1] * len(naive.edits)
    assert (ROOT / naive.tests[0]).is_file()
