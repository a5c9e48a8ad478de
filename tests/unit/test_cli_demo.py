# SPDX-License-Identifier: Apache-2.0
"""The demo's judgement: counters, differences, figures, and what it refuses to start with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_dspark import __version__
from vllm_dspark.cli import COMMANDS, CommandError, demo, main
from vllm_dspark.cli.counters import Counters, settled
from vllm_dspark.cli.figures import ACCEPT_LEN_WANTED, DemoFigures, write_json
from vllm_dspark.cli.traffic import (
    NEAR_TIE_LOGIT_GAP,
    Client,
    Difference,
    Greedy,
    first_difference,
    read_prompts,
)

HOST_METRICS = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 70.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 25.0
"""
PLUGIN_METRICS = """
# TYPE vllm:dspark_draft_tokens_scheduled counter
vllm:dspark_draft_tokens_scheduled_total{engine="0"} 40.0
vllm:dspark_draft_tokens_scheduled_total{engine="1"} 25.0
# TYPE vllm:dspark_draft_tokens_admitted counter
vllm:dspark_draft_tokens_admitted_total{engine="0"} 30.0
vllm:dspark_draft_tokens_admitted_total{engine="1"} 20.0
# TYPE vllm:dspark_draft_tokens_trimmed counter
vllm:dspark_draft_tokens_trimmed_total{engine="0"} 15.0
"""


class TestCounters:
    def test_host_counters_alone(self) -> None:
        counters = Counters.parse(HOST_METRICS)
        assert counters == Counters(10, 70, 70, 0, 25, from_plugin=False)
        assert counters.accept_len == 3.5

    def test_plugin_counters_say_what_was_verified(self) -> None:
        counters = Counters.parse(HOST_METRICS + PLUGIN_METRICS)
        assert counters == Counters(10, 65, 50, 15, 25, from_plugin=True)

    def test_no_speculation(self) -> None:
        counters = Counters.parse("# TYPE other counter\nother_total 3.0\n")
        assert counters == Counters(0, 0, 0, 0, 0, from_plugin=False)
        assert counters.accept_len == 1.0

    def test_difference_of_two_readings(self) -> None:
        later, earlier = Counters(10, 70, 50, 20, 25, True), Counters(4, 28, 18, 10, 5, True)
        assert later.since(earlier) == Counters(6, 42, 32, 10, 20, True)

    def test_settled_waits_for_late_counters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_dspark.cli.counters.SETTLE_S", 0.0)
        readings = iter(["", HOST_METRICS, HOST_METRICS + PLUGIN_METRICS] + [HOST_METRICS] * 2)
        assert settled(lambda: next(readings)) == Counters.parse(HOST_METRICS)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 9]) == 1
    with pytest.raises(ValueError, match="zip"):
        first_difference([1, 2], [1])


def test_differences_ask_for_the_gap_where_the_tokens_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[int], int, int]] = []

    def logit_gap(self: Client, context: list[int], one: int, other: int) -> float:
        asked.append((context, one, other))
        return 0.5

    monkeypatch.setattr(Client, "logit_gap", logit_gap)
    client = object.__new__(Client)
    expected = [Greedy([7], [1, 2, 3]), Greedy([8, 9], [4, 5, 6])]
    got = [Greedy([7], [1, 2, 3]), Greedy([8, 9], [4, 0, 1])]
    assert client.differences(expected, got) == [Difference(1, 1, 5, 0, 0.5)]
    assert asked == [([8, 9, 4], 5, 0)]


def figures(accepted: int = 25, differences: Sequence[Difference] = ()) -> DemoFigures:
    counters = Counters(10, 70, 50, 20, accepted, from_plugin=True)
    return DemoFigures(4, 64, 2, 8.0, 16.0, counters, list(differences))


NEAR = Difference(3, 12, 5, 6, NEAR_TIE_LOGIT_GAP)
FAR = Difference(3, 12, 5, 6, NEAR_TIE_LOGIT_GAP * 1.01)
UNRELATED = Difference(3, 12, 5, 6, None)


class TestFigures:
    def test_equal_and_accepted(self) -> None:
        assert figures().passed
        assert (figures().tok_s, figures().tok_s_without) == (32.0, 16.0)

    def test_short_accepted_length_fails(self) -> None:
        enough = round((ACCEPT_LEN_WANTED - 1) * 10)
        assert figures(accepted=enough).passed
        assert not figures(accepted=enough - 1).passed

    def test_near_tie_passes_and_is_shown(self) -> None:
        near = figures(differences=[NEAR])
        assert near.passed
        assert not near.tokens_equal
        assert "1 differ, near-ties only" in near.table()
        assert "prompt 3, token 12: 5 without, 6 with (logit gap 0.1250): near-tie" in near.table()

    @pytest.mark.parametrize("difference", [FAR, UNRELATED])
    def test_real_difference_fails_and_is_shown(self, difference: Difference) -> None:
        bad = figures(differences=[NEAR, difference])
        assert not bad.passed
        assert not bad.lossless
        assert "DIFFERENT" in bad.table()

    def test_table_has_every_count(self) -> None:
        table = " ".join(figures().table().split())
        for text in ("scheduled 70", "verified 50", "trimmed 20 (29%)", "accepted 25", "3.50"):
            assert text in table

    def test_record_can_be_read_back(self) -> None:
        record = json.loads(json.dumps(figures(differences=[NEAR]).record()))
        wanted = {"tokens_equal", "accept_len", "tok_s", "versions", "commit", "command"}
        assert wanted <= set(record)
        assert record["accept_len"] == 3.5
        assert record["versions"]["vllm-dspark"] == __version__
        assert record["drafts"]["trimmed"] == 20
        assert record["differences"][0]["near_tie"] is True


class TestPair:
    def test_one_of_two_folders(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="--model and --draft belong together"):
            demo.pair(tmp_path, None)

    def test_folder_without_a_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match=f"--model {tmp_path}: no config.json"):
            demo.pair(tmp_path, tmp_path)

    def test_installed_package_has_no_demo(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "DEMO_FOLDER", tmp_path / "demo")
        with pytest.raises(CommandError, match="--model and --draft"):
            demo.pair(None, None)

    def test_block_size_comes_from_the_drafter(self, tmp_path: Path) -> None:
        draft = demo.DEMO_FOLDER / "draft"
        assert demo.speculative_config(draft) == {
            "method": "dspark",
            "model": str(draft),
            "num_speculative_tokens": 7,
        }
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(CommandError, match="no block_size"):
            demo.speculative_config(tmp_path)


class TestPrompts:
    def test_demo_prompts(self) -> None:
        prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", 64)
        assert len(set(prompts)) == 64

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [('{"prompt": "a"}\n', "has 1 prompts"), ("{}\n{}\n", '"prompt"'), ("[]\n", '"prompt"')],
    )
    def test_unusable_file(self, tmp_path: Path, content: str, complaint: str) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text(content)
        with pytest.raises(CommandError, match=complaint):
            read_prompts(file, 2)


class TestCommandLine:
    def test_help_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
        shown = capsys.readouterr().out
        assert caught.value.code == 0
        assert all(f"  {name} " in shown for name in COMMANDS)

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["nonsense"],
            ["demo", "--prompts", "0"],
            ["demo", "--prompts", "many"],
            ["demo", "--port", "70000"],
            ["demo", "--dspark", '{"turbo": 1}'],
            ["demo", "--dspark", "not json"],
        ],
    )
    def test_bad_usage_is_two(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().err

    def test_failed_command_is_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--prompts", "1000000"]) == 1
        assert "--prompts 1000000" in capsys.readouterr().err

    def test_signal_handler_is_the_old_one_afterwards(self, monkeypatch: Any) -> None:
        import signal

        before = signal.getsignal(signal.SIGTERM)
        main(["demo", "--prompts", "1000000"])
        assert signal.getsignal(signal.SIGTERM) is before


def test_figures_that_cannot_be_written_are_a_mistake_of_the_operator(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="figures.json: cannot be written"):
        write_json(tmp_path / "missing" / "figures.json", figures().record())
