"""The page on the daemon's protocol is what the code says."""

from __future__ import annotations

from cached import events
from cached.protocol import EVENT_KINDS
from tests.support import cached_page


def test_the_protocols_page_is_what_the_message_table_says() -> None:
    found = cached_page.PAGE.read_text(encoding="utf-8")

    assert found == cached_page.page(), "run python -m tests.support.cached_page"


def test_kinds_of_events_have_the_numbers_of_their_names() -> None:
    assert [EVENT_KINDS[number] for number in (events.STORED, events.REMOVED, events.UPDATED)] == [
        "stored",
        "removed",
        "updated",
    ]
