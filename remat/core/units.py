"""The units of a graph's sizes and costs, and how to write them as text.

A traced graph has bytes, and seconds or floating-point operations; a published instance has numbers
without a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.graph import Graph

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "B": ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB")),
    "s": ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1, "s")),
    "FLOP": ((1, "FLOP"), (1e6, "MFLOP"), (1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP")),
    "": ((1, ""), (1e3, "thousand"), (1e6, "million"), (1e9, "billion"), (1e12, "trillion")),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit for an axis or a column: its size in the base unit, and its name."""

    factor: float
    name: str

    @classmethod
    def for_largest(cls, largest: float, unit: str) -> Scale:
        """Returns the largest scale of `unit` that is not above `largest`, or the smallest scale.

        `unit` is `"B"`, `"s"`, `"FLOP"` or `""`.

        >>> Scale.for_largest(3 * 2**30, "B").name, Scale.for_largest(0.25, "s").name
        ('GiB', 'ms')
        """
        fitting = [scale for scale in _SCALES[unit] if scale[0] <= largest]
        return cls(*(fitting[-1] if fitting else _SCALES[unit][0]))

    def text(self, number: float) -> str:
        """Returns `number`, given in the base unit, in this scale with about three digits."""
        scaled = number / self.factor
        digits = (
            f"{scaled:,.0f}" if abs(scaled) >= 100 or scaled == int(scaled) else f"{scaled:.3g}"
        )
        return f"{digits} {self.name}".rstrip()

    def label(self, text: str, unit: str) -> str:
        """Returns `text` with this scale: `memory (GiB)`, or `memory (units)` without a unit."""
        return f"{text} ({self.name})" if unit else f"{text} ({self.name} units)".replace("( ", "(")


@dataclass(frozen=True, slots=True)
class Units:
    """The units of sizes (`"B"` or `""`) and of costs (`"s"`, `"FLOP"` or `""`)."""

    size: str = "B"
    cost: str = "s"

    @classmethod
    def of(cls, graph: Graph) -> Units:
        """Returns the units of a graph, from its device and its cost model."""
        is_timed = graph.costs.startswith(("roofline", "profile"))
        return cls(
            "B" if graph.device or graph.costs else "",
            "s" if is_timed else "FLOP" if graph.costs.startswith("flops") else "",
        )

    def size_text(self, size: float) -> str:
        """Returns a size as text.

        >>> Units().size_text(2_007_959_040), Units(size="").size_text(9_301_354)
        ('1.87 GiB', '9,301,354')
        """
        return Scale.for_largest(abs(size), self.size).text(size) if self.size else f"{size:,.0f}"

    def cost_text(self, cost: float) -> str:
        """Returns a cost as text.

        >>> Units().cost_text(0.0123), Units(cost="").cost_text(255828)
        ('12.3 ms', '255,828')
        """
        if self.cost:
            return Scale.for_largest(abs(cost), self.cost).text(cost)
        return f"{cost:,.0f}" if cost == int(cost) or cost >= 1000 else f"{cost:.4g}"
