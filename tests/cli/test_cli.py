"""Of all commands: help with examples, output of 80 columns; `--version` and `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.tracers.synthetic import transformer
from tests.support.command_line import Run


@pytest.mark.parametrize("command", [(), ("trace",), ("solve",), ("doctor",)])
def test_help_lists_the_exit_statuses(run: Run, command: tuple[str, ...]) -> None:
    text = " ".join(run(*command, "--help").stdout.split())
    assert "Exit status" in text
    assert "2 bad input" in text


def test_doctor_finds_nothing_wrong_here(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    for word in ("torch", "highspy", "cache", "self-check"):
        assert word in result.stdout
    assert "BAD" not in result.stdout


@pytest.mark.parametrize("option", ["--budget", "--reserve"])
def test_doctor_names_the_option_that_it_can_not_read(run: Run, option: str) -> None:
    result = run("doctor", "never.imported:make", option, "8G")
    assert result.exit_code == 2
    assert f"remat: {option}: budget '8G' has the unknown unit" in result.stderr


def test_doctor_takes_options_of_a_model_only_with_a_model(run: Run) -> None:
    result = run("doctor", "--device", "H100")
    assert result.exit_code == 2
    assert "these options are for a model, and none was given: MODULE:CALLABLE" in result.stderr


def test_doctor_exits_with_1_if_something_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "file" / name))
    result = run("doctor")
    assert result.exit_code == 1
    assert "BAD" in result.stdout
    assert "can't be written" in result.stdout


def test_help_has_an_example_of_every_command(run: Run) -> None:
    assert run("--help").exit_code == 0
    for command in ("demo", "trace", "solve", "frontier", "plot", "bench"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"remat {command} " in result.stdout, command


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.strip() == "remat 0.1.0"


WIDE = [
    "bench",
    "INSTANCE",
    "--budget",
    "90%",
    "--solver",
    "chen-sqrt",
    "--solver",
    "pytorch-knapsack",
    "--solver",
    "recompute-attention",
]
COMMANDS = {
    "bench": WIDE,
    "solve": ["solve", "INSTANCE", "--budget", "90%", "--solver", "chen-sqrt"],
    "frontier": ["frontier", "INSTANCE", "--points", "3", "--solver", "chen-sqrt"],
    "sweep": [
        "sweep",
        "INSTANCE",
        "--budget",
        "90%",
        "--budget",
        "1MiB",
        "--solver",
        "chen-sqrt",
        "--jobs",
        "1",
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_output_fits_a_terminal_of_80_columns_without_colour(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    step = transformer(2, width=2**16)
    step.with_costs([op.cost_s * 1e-4 for op in step.operators], costs="roofline:H100").save(
        tmp_path / "instance.json"
    )

    result = run(
        *["instance.json" if argument == "INSTANCE" else argument for argument in COMMANDS[command]]
    )

    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
