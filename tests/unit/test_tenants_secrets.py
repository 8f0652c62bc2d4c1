"""The master key's file and the vault."""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path

import pytest

from tenants.errors import AccessDenied, MasterKeyError, SealBroken
from tenants.secrets import MASTER_KEY_BYTES, MasterKey, Vault, load_or_create_master_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "master.key"


def write_key(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_first_use_makes_a_private_file_in_a_private_directory(path):
    master = load_or_create_master_key(path)

    assert path.read_bytes() == master.key
    assert len(master.key) == MASTER_KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_mode_does_not_hang_on_the_umask(path):
    before = os.umask(0)
    try:
        load_or_create_master_key(path)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_later_use_reads_the_same_key_and_leaves_nothing_beside_it(path):
    assert load_or_create_master_key(path) == load_or_create_master_key(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["master.key"]


def test_no_repr_shows_the_key(path):
    master = load_or_create_master_key(path)

    assert str(master.key) not in repr(master)
    assert repr(Vault(master)) == f"Vault(origin={str(path)!r})"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o601, 0o644, 0o666])
def test_a_key_that_others_can_use_is_refused_with_the_command_that_mends_it(path, mode):
    write_key(path, bytes(32), mode)

    with pytest.raises(AccessDenied, match=re.escape(f"(mode {mode:04o}); run: chmod 600 {path}")):
        load_or_create_master_key(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_of_the_owner_alone_is_taken(path, mode):
    write_key(path, b"k" * 32, mode)

    assert load_or_create_master_key(path).key == b"k" * 32


@pytest.mark.parametrize(
    ("size", "said"), [(0, "is empty"), (31, "has 31 bytes"), (33, "more than 32"), (10_000, "more than 32")]
)
def test_a_key_of_the_wrong_size_is_refused_and_left_as_it_is(path, size, said):
    write_key(path, b"k" * size)

    with pytest.raises(MasterKeyError, match=said) as caught:
        load_or_create_master_key(path)

    assert str(path) in str(caught.value)
    assert "Restore it from a backup" in str(caught.value)
    assert path.read_bytes() == b"k" * size


def test_a_directory_in_its_place_is_refused(path):
    path.mkdir(parents=True)

    with pytest.raises(MasterKeyError, match="regular file"):
        load_or_create_master_key(path)


def test_a_named_pipe_in_its_place_is_refused_without_waiting(path):
    path.parent.mkdir()
    os.mkfifo(path, 0o600)

    with pytest.raises(MasterKeyError, match="regular file"):
        load_or_create_master_key(path)


def test_a_link_to_nothing_is_refused(path):
    path.parent.mkdir()
    path.symlink_to(path.parent / "elsewhere")

    with pytest.raises(MasterKeyError, match="link to a file that does not exist"):
        load_or_create_master_key(path)

    assert not (path.parent / "elsewhere").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "state").write_text("a file where the directory should be")

    with pytest.raises(MasterKeyError, match=r"state/master\.key can be neither read nor made"):
        load_or_create_master_key(tmp_path / "state" / "master.key")


ACL_OWNER, ACL_USER, ACL_GROUP_OWNER, ACL_GROUP, ACL_MASK, ACL_OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def set_acl(path: Path, *extra: tuple[int, int, int], group_owner: int = 0) -> None:
    nobody = 0xFFFFFFFF
    entries = [
        (ACL_OWNER, 6, nobody),
        *extra,
        (ACL_GROUP_OWNER, group_owner, nobody),
        (ACL_MASK, 4, nobody),
        (ACL_OTHER, 0, nobody),
    ]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    try:
        os.setxattr(path, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error.strerror}")


def test_a_credential_that_systemd_grants_to_this_user_by_a_list_is_taken(path):
    """systemd leaves the file to root and admits the service's user by an access control list; the list's mask then
    shows up as the group's bits (0440), though no group may read it."""
    write_key(path, b"k" * 32)
    set_acl(path, (ACL_USER, 4, os.geteuid()))

    assert stat.S_IMODE(path.stat().st_mode) & 0o070
    assert load_or_create_master_key(path).key == b"k" * 32


@pytest.mark.parametrize("entry", [(ACL_USER, 4, 54321), (ACL_GROUP, 4, 54321)])
def test_a_list_that_admits_somebody_else_is_refused(path, entry):
    write_key(path, b"k" * 32)
    set_acl(path, entry)

    with pytest.raises(AccessDenied):
        load_or_create_master_key(path)


def test_a_list_that_admits_the_group_is_refused(path):
    write_key(path, b"k" * 32)
    set_acl(path, (ACL_USER, 4, os.geteuid()), group_owner=4)

    with pytest.raises(AccessDenied):
        load_or_create_master_key(path)


def make_vault(fill: bytes = b"m") -> Vault:
    return Vault(MasterKey(fill * 32, "/state/master.key"))


def test_what_was_sealed_opens_in_its_place():
    vault = make_vault()

    assert (
        vault.open(vault.seal(b"secret", "tenants", "salt_secret", "tn_1"), "tenants", "salt_secret", "tn_1")
        == b"secret"
    )


def test_sealing_twice_gives_different_records():
    vault = make_vault()

    assert vault.seal(b"secret", "t", "c", "1") != vault.seal(b"secret", "t", "c", "1")


@pytest.mark.parametrize(
    "place",
    [
        ("keys", "salt_secret", "tn_1"),
        ("tenants", "other", "tn_1"),
        ("tenants", "salt_secret", "tn_2"),
        ("tenantss", "alt_secret", "tn_1"),
    ],
)
def test_a_record_does_not_open_in_another_place(place):
    sealed = make_vault().seal(b"secret", "tenants", "salt_secret", "tn_1")

    with pytest.raises(SealBroken):
        make_vault().open(sealed, *place)


def test_no_altered_byte_goes_unnoticed():
    vault = make_vault()
    sealed = vault.seal(b"secret", "t", "c", "1")

    for position in range(len(sealed)):
        altered = bytearray(sealed)
        altered[position] ^= 1
        with pytest.raises(SealBroken):
            vault.open(bytes(altered), "t", "c", "1")


@pytest.mark.parametrize("length", range(30))
def test_a_record_cut_short_is_refused(length):
    vault = make_vault()

    with pytest.raises(SealBroken):
        vault.open(vault.seal(b"secret", "t", "c", "1")[:length], "t", "c", "1")


def test_another_master_key_is_refused_with_the_file_and_what_to_do():
    sealed = make_vault(b"m").seal(b"secret", "tenants", "salt_secret", "tn_1")

    with pytest.raises(SealBroken, match=r"tenants\.salt_secret of tn_1 .*/state/master\.key.*Put back") as caught:
        make_vault(b"n").open(sealed, "tenants", "salt_secret", "tn_1")

    assert "secret'" not in str(caught.value)


def test_the_pepper_hangs_on_the_master_key_and_is_not_it():
    assert make_vault(b"m").pepper == make_vault(b"m").pepper
    assert make_vault(b"m").pepper != make_vault(b"n").pepper
    assert make_vault(b"m").pepper != b"m" * 32


def test_a_vault_refuses_a_master_key_of_another_size():
    with pytest.raises(MasterKeyError, match="16 bytes"):
        Vault(bytes(16))
