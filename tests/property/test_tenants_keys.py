"""Keys and salts, for all inputs."""

from __future__ import annotations

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from tenants.keys import KEY_RANDOM_BYTES, generate_key, name_key, parse_key
from tenants.salts import derive_salt

random_bytes = st.binary(min_size=KEY_RANDOM_BYTES, max_size=KEY_RANDOM_BYTES)
salt_secrets = st.binary(min_size=32, max_size=32)
subjects = st.none() | st.text(st.characters(codec="utf-8"), min_size=1)
epochs = st.integers(0, 2**64)


@given(random_bytes)
def test_what_was_generated_is_parsed_to_the_same_parts(data):
    key = generate_key(data)

    parsed = parse_key(key.text)

    assert parsed is not None
    assert (parsed.public_id, parsed.secret) == (key.public_id, key.secret)
    assert name_key(key.text).public_id == key.public_id


@given(random_bytes, st.data())
def test_any_single_changed_character_is_refused(data, draw):
    text = generate_key(data).text
    position = draw.draw(st.integers(0, len(text) - 1))
    character = draw.draw(st.characters() | st.sampled_from("0Aaz_"))
    assume(character != text[position])

    assert parse_key(text[:position] + character + text[position + 1 :]) is None


@given(random_bytes, st.data())
def test_any_single_character_lost_added_or_swapped_with_its_neighbour_is_refused(data, draw):
    text = generate_key(data).text
    position = draw.draw(st.integers(0, len(text) - 2))
    swapped = text[:position] + text[position + 1] + text[position] + text[position + 2 :]

    assert parse_key(text[:position] + text[position + 1 :]) is None
    assert parse_key(text[:position] + "0" + text[position:]) is None
    assert swapped == text or parse_key(swapped) is None


@given(st.text())
def test_no_other_text_is_a_key(text):
    assert parse_key(text) is None


@given(random_bytes, random_bytes)
def test_different_random_bytes_make_different_keys(one, other):
    assume(one != other)

    assert generate_key(one).text != generate_key(other).text


@given(salt_secrets, st.text(st.characters(codec="utf-8")), epochs, subjects)
def test_a_salt_is_43_characters_that_every_engine_takes(secret, tenant_id, epoch, subject):
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", derive_salt(secret, tenant_id, epoch, subject))


@given(
    st.lists(
        st.tuples(salt_secrets, st.sampled_from(["tn_1", "tn_11", "tn_"]), st.sampled_from([0, 1, 11]), subjects),
        unique=True,
    )
)
def test_no_two_tenants_epochs_or_subjects_share_a_salt(places):
    assert len({derive_salt(*place) for place in places}) == len(places)
