"""Which retention a request gets: its own wish, its tenant's default, and the ceilings over both."""

from __future__ import annotations

import pytest

from cached.retention import DEFAULT_RETENTION, Retention, parse_listed
from gateway.retention import MAX_SHOWN, check_rules, clamped_header, decide
from tenants.errors import InvalidValue
from tenants.values import NO_RETENTION_RULES, RetentionRules

DEFAULT = '{"token_ranges": [{"start": 0, "end": 8, "priority": 80}]}'


def test_without_rules_a_request_gets_what_it_asks_for() -> None:
    asked = parse_listed({"token_ranges": [{"start": 0, "priority": 100}], "decode_priority": 100})

    decided = decide(asked, NO_RETENTION_RULES)

    assert (decided.config, decided.clamped) == (asked.config, ())
    assert decide(None, NO_RETENTION_RULES).config == DEFAULT_RETENTION


def test_the_default_speaks_for_a_request_that_says_nothing_and_only_for_that() -> None:
    rules = RetentionRules(default=DEFAULT)

    assert decide(None, rules).config.for_prompt_block(0) == Retention(80)
    assert decide(parse_listed({}), rules).config == DEFAULT_RETENTION


def test_ceilings_hold_for_wish_and_default_alike() -> None:
    rules = RetentionRules(DEFAULT, 60, 300.0)
    asked = parse_listed({"decode_priority": 70, "decode_duration": 10})

    assert decide(asked, rules).clamped == ("decode_priority=60",)
    assert decide(asked, rules).config.decode == Retention(60, 10.0)
    assert decide(None, rules).clamped == ("token_ranges[0].priority=60", "token_ranges[0].duration=300")


def test_a_default_that_cannot_be_read_counts_as_none_and_is_told() -> None:
    rules = RetentionRules(default='{"token_ranges": 7}', max_priority=60)

    assert decide(None, rules) == decide(None, RetentionRules(default="{"))
    assert decide(None, rules).is_default_unreadable
    assert decide(None, rules).config == DEFAULT_RETENTION
    assert not decide(parse_listed({}), rules).is_default_unreadable


def test_the_header_is_bounded_and_says_how_much_is_missing() -> None:
    listed = [{"start": start, "end": start + 1, "priority": 100} for start in range(64)]
    decided = decide(parse_listed({"token_ranges": listed}), RetentionRules(max_priority=60, max_duration_s=3600.0))

    value = clamped_header(decided.clamped)

    assert len(decided.clamped) == 128
    assert value.startswith("token_ranges[0].priority=60, token_ranges[0].duration=3600, token_ranges[1]")
    assert value.endswith(f", and {128 - MAX_SHOWN} more")
    assert len(value) < 1500
    assert value.isascii()
    assert clamped_header(("decode_priority=60",)) == "decode_priority=60"


def test_checked_rules_are_in_one_spelling_and_checking_again_changes_nothing() -> None:
    checked, lowered = check_rules(RetentionRules(DEFAULT, max_priority=60))

    assert lowered == ("token_ranges[0].priority=60",)
    assert checked.default is not None
    assert '"priority": 80' in checked.default, "a default stays as it was said: ceilings may be lifted"
    assert check_rules(checked) == (checked, lowered)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (RetentionRules(default="[]"), "must be an object"),
        (RetentionRules(max_priority=20), "from 35 to 100"),
        (RetentionRules(max_duration_s=-1.0), "greater than 0"),
    ],
)
def test_illegal_rules_are_refused_with_the_rule(rules: RetentionRules, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        check_rules(rules)
