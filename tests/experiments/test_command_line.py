"""The arguments that scripts share."""

from __future__ import annotations

import pytest

from experiments.command_line import add_names, parser_of


@pytest.mark.parametrize(
    ("words", "names"),
    [([], ("GPT", "BERT")), (["BERT"], ["BERT"]), (["BERT", "GPT"], ["BERT", "GPT"])],
)
def test_all_names_are_meant_if_none_is_given(words: list[str], names: object) -> None:
    parser = parser_of(None)
    add_names(parser, {"GPT": 1, "BERT": 2}, "MODEL")
    assert parser.parse_args(words).names == names


def test_an_unknown_name_is_refused_beside_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = parser_of(None)
    add_names(parser, ["GPT", "BERT"], "MODEL")
    with pytest.raises(SystemExit):
        parser.parse_args(["GPT", "T5"])
    assert "'T5' is none of GPT, BERT" in capsys.readouterr().err
