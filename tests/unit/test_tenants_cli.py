"""The commands `tenant` and `key`, without a terminal: what they print, and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from gateway.retention import check_rules
from tenants.cli import key, tenant
from tenants.config import TenantsConfig
from tenants.keys import parse_key
from tenants.store import Store, open_store

ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


class CommandLine:
    """Runs commands on one store, as a script would."""

    def __init__(self, directory: Path) -> None:
        self.stdin: str | None = None
        self.host_tier_bytes = 2**30
        self.config = TenantsConfig(url=f"sqlite:///{directory}/tenants.db", master_key_file=directory / "master.key")

    def __call__(self, words: str, *more: str) -> Result:
        group, *rest = words.split()
        command = {"tenant": tenant, "key": key}[group]
        context = SimpleNamespace(
            tenants=self.config, check_retention=check_rules, host_tier_bytes=lambda: self.host_tier_bytes
        )
        return CliRunner().invoke(command, [*rest, *more], input=self.stdin, obj=context)

    def store(self) -> Store:
        return open_store(self.config.url, self.config.master_key_file)


@pytest.fixture
def run(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path / "state")


@pytest.fixture
def acme(run: CommandLine) -> CommandLine:
    assert run("tenant create acme").exit_code == 0
    return run


def test_create_shows_the_tenant_and_says_what_comes_next(run):
    result = run("tenant create acme")

    assert result.exit_code == 0
    assert re.fullmatch(rf"acme\tactive\t0\t1\t{ISO}\ttn_\w{{22}}\t\t\t\t1\t0\t\n", result.stdout)
    assert "halocline key create acme" in result.stderr


def test_json_of_a_tenant_has_a_schema(acme):
    shown = json.loads(acme("tenant show acme --json").stdout)

    assert shown["schema"] == "halocline.tenant.v1"
    assert {"name": "acme", "state": "active", "active_keys": 0, "salt_epoch": 1}.items() <= shown.items()
    rules = {"max_priority", "max_duration_s", "default_retention"}
    share = {"cache_weight", "cache_floor_bytes", "cache_ceiling_bytes"}
    assert set(shown) == {"schema", "name", "state", "active_keys", "salt_epoch", "created_at", "id"} | rules | share
    assert {shown[rule] for rule in rules} == {None}


def test_json_of_a_list_is_one_object_whose_elements_are_what_show_prints(acme):
    acme("tenant create beta")

    listed = json.loads(acme("tenant list --json").stdout)

    assert listed["schema"] == "halocline.tenant-list.v1"
    assert listed["tenants"][0] == json.loads(acme("tenant show acme --json").stdout)
    assert [one["name"] for one in listed["tenants"]] == ["acme", "beta"]


def test_a_list_in_a_pipe_is_tab_separated_without_a_header(acme):
    acme("tenant create beta")

    lines = acme("tenant list").stdout.splitlines()

    assert [line.split("\t")[0] for line in lines] == ["acme", "beta"]
    assert {line.count("\t") for line in lines} == {11}


@pytest.mark.parametrize(("command", "empty"), [("tenant list", "tenants"), ("key list", "keys")])
def test_an_empty_list_is_empty_on_stdout_and_explained_on_stderr(run, command, empty):
    assert run(command).stdout == ""
    assert "create" in run(command).stderr
    assert json.loads(run(f"{command} --json").stdout)[empty] == []


def test_the_active_keys_are_counted_as_of_now(acme):
    made = [acme("key create acme").stdout.strip() for _ in range(3)]
    acme(f"key revoke {parse_key(made[0]).public_id}")

    assert acme("tenant list").stdout.split("\t")[2] == "2"


def test_suspend_and_resume_show_the_new_state(acme):
    assert acme("tenant suspend acme").stdout.split("\t")[1] == "suspended"
    assert acme("tenant resume acme").stdout.split("\t")[1] == "active"


# Retention.

DEFAULT = {"token_ranges": [{"start": 64, "priority": 30}, {"start": 0, "end": 64, "priority": 80, "duration": 600.0}]}


def test_a_default_from_stdin_and_ceilings_are_shown_by_show(acme):
    acme.stdin = json.dumps(DEFAULT)

    result = acme("tenant retention acme --default - --max-priority 60 --max-duration 300.5 --json")

    assert result.exit_code == 0, result.output
    shown = json.loads(acme("tenant show acme --json").stdout)
    assert (shown["max_priority"], shown["max_duration_s"]) == (60, 300.5)
    assert shown["default_retention"]["token_ranges"][0] == {"start": 0, "end": 64, "priority": 80, "duration": 600}
    assert json.loads(result.stdout) == shown
    assert (
        "lower this tenant's own default: token_ranges[0].priority=60, token_ranges[0].duration=300.5" in result.stderr
    )


def test_what_is_not_named_stays_and_none_lifts_a_ceiling(acme, tmp_path):
    file = tmp_path / "default.json"
    file.write_text(json.dumps(DEFAULT))
    acme(f"tenant retention acme --default {file} --max-priority 60")

    acme("tenant retention acme --max-duration 300")
    acme("tenant retention acme --max-priority none")

    shown = json.loads(acme("tenant retention acme --json").stdout)
    assert (shown["max_priority"], shown["max_duration_s"]) == (None, 300)
    assert shown["default_retention"]["decode_priority"] == 35


def test_clear_forgets_everything_before_the_rest_is_applied(acme):
    acme("tenant retention acme --max-priority 60 --max-duration 300")

    assert acme("tenant retention acme --clear --max-priority 70").stdout.split("\t")[6:9] == ["70", "", ""]
    assert acme("tenant retention acme --clear").stdout.split("\t")[6:9] == ["", "", ""]


def test_the_rules_survive_a_suspension(acme):
    acme("tenant retention acme --max-priority 60")

    acme("tenant suspend acme")

    assert json.loads(acme("tenant resume acme --json").stdout)["max_priority"] == 60


@pytest.mark.parametrize(
    ("options", "stdin", "says"),
    [
        ("--max-priority 101", None, "max_priority is 101; it must be an integer from 35 to 100"),
        ("--max-priority 34", None, "max_priority is 34; it must be an integer from 35 to 100"),
        ("--max-priority 3.5", None, "--max-priority is '3.5'; it must be a whole number, or none"),
        ("--max-duration 0", None, "max_duration is 0.0; it must be null or seconds greater than 0"),
        ("--max-duration nan", None, "max_duration is nan"),
        ("--max-duration soon", None, "--max-duration is 'soon'; it must be a number of seconds, or none"),
        ("--default -", "{", "is not JSON"),
        ("--default -", "null", "must be an object"),
        ("--default -", "x" * 70_000, "has more than 65536 characters"),
        ("--default no/such/file", None, "no/such/file cannot be read: No such file"),
        (
            "--default -",
            '{"token_ranges": [{"start": 0, "priority": 1}, {"start": 9, "priority": 101}]}',
            "token_ranges[1].priority is 101; it must be an integer from 0 to 100",
        ),
    ],
)
def test_illegal_rules_end_with_6_name_range_and_rule_and_change_nothing(acme, options, stdin, says):
    acme("tenant retention acme --max-priority 60")
    acme.stdin = stdin

    result = acme(f"tenant retention acme {options}")

    assert result.exit_code == 6, result.output
    assert says in result.stderr
    assert result.stdout == ""
    assert json.loads(acme("tenant show acme --json").stdout)["max_priority"] == 60


def test_retention_of_a_tenant_that_is_not_there_ends_with_3(acme):
    assert acme("tenant retention acne --max-priority 60").exit_code == 3


# Shares of the caches.


def share_of(acme: CommandLine) -> tuple[float, int, int | None]:
    shown = json.loads(acme("tenant show acme --json").stdout)
    return shown["cache_weight"], shown["cache_floor_bytes"], shown["cache_ceiling_bytes"]


def test_a_share_is_set_by_its_parts_and_what_is_not_named_stays(acme):
    result = acme("tenant share acme --floor 1MiB --ceiling 0.5GiB --json")

    assert result.exit_code == 0, result.output
    assert share_of(acme) == (1, 2**20, 2**29)
    acme("tenant share acme --weight 2.5")
    assert share_of(acme) == (2.5, 2**20, 2**29)
    acme("tenant share acme --ceiling none")
    assert share_of(acme) == (2.5, 2**20, None)
    acme("tenant share acme --floor none")
    assert share_of(acme) == (2.5, 0, None)
    acme("tenant share acme --clear")
    assert share_of(acme) == (1, 0, None)


def test_a_share_asked_for_without_an_option_is_shown_and_not_changed(acme):
    acme("tenant share acme --weight 3")
    with acme.store() as store:
        before = store.version()

    assert json.loads(acme("tenant share acme --json").stdout)["cache_weight"] == 3

    with acme.store() as store:
        assert store.version() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--weight 0", "the weight is 0; it must be from 0.01 to 100"),
        ("--weight nan", "the weight is nan"),
        ("--weight much", "--weight is 'much'; it must be a number"),
        ("--floor 25%", "--floor is '25%'; it must be a size, such as 512MiB or 8GiB, or none for no floor"),
        ("--floor=-1", "--floor is '-1'"),
        ("--ceiling all", "--ceiling is 'all'"),
        ("--ceiling 999999999999PiB", "the ceiling is"),
        ("--floor 2GiB --ceiling 1GiB", "the floor (2147483648 bytes) is above the ceiling (1073741824 bytes)"),
    ],
)
def test_an_illegal_share_ends_with_6_value_and_rule_and_changes_nothing(acme, options, says):
    acme("tenant share acme --floor 1MiB")

    result = acme(f"tenant share acme {options}")

    assert result.exit_code == 6, result.output
    assert says in result.stderr
    assert share_of(acme) == (1, 2**20, None)


def test_a_share_of_a_tenant_that_is_not_there_ends_with_3(acme):
    assert acme("tenant share acne --weight 2").exit_code == 3


def test_floors_that_exceed_the_tier_are_warned_about_with_both_sizes(acme):
    """The daemon would refuse them whole, and say so where nobody looks who has just typed this."""
    acme("tenant create beta")
    assert "warning" not in acme("tenant share acme --floor 512MiB").stderr

    result = acme("tenant share beta --floor 768MiB")

    assert result.exit_code == 0
    assert "1.25 GiB together, and cached.host_cache_size is 1 GiB" in result.stderr


# Keys.


def test_a_new_key_stands_alone_on_stdout(acme):
    result = acme("key create acme --label laptop")

    assert result.exit_code == 0
    assert parse_key(result.stdout.removesuffix("\n")) is not None
    assert "shown this once" in result.stderr
    assert parse_key(result.stdout.strip()).secret not in result.stderr


def test_json_of_a_new_key_holds_the_key_once_and_no_list_ever_does(acme):
    made = json.loads(acme("key create acme --label ci --json").stdout)
    listed = acme("key list --json").stdout

    assert made["schema"] == "halocline.key.v1"
    assert parse_key(made["key"]).public_id == made["public_id"]
    assert json.loads(listed)["keys"] == [{name: value for name, value in made.items() if name != "key"}]
    assert parse_key(made["key"]).secret not in listed


def test_keys_are_listed_with_what_was_said_of_them(acme):
    acme("key create acme --expires 30 --label", "two words")

    columns = acme("key list acme").stdout.rstrip("\n").split("\t")

    assert re.fullmatch(r"\w{12}", columns[0])
    assert columns[1:4] == ["acme", "two words", "active"]
    assert re.fullmatch(ISO, columns[4])
    assert re.fullmatch(ISO, columns[5])
    assert columns[6] == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2099-01-31", "2099-01-31T00:00:00Z"),
        ("2099-01-31T12:00", "2099-01-31T12:00:00Z"),
        ("2099-01-31T12:00:00+01:00", "2099-01-31T11:00:00Z"),
        ("2099-01-31T12:00:00Z", "2099-01-31T12:00:00Z"),
    ],
)
def test_an_end_may_be_a_date_or_a_time(acme, text, shown):
    assert acme(f"key create acme --expires {text}").exit_code == 0

    assert acme("key list acme").stdout.split("\t")[5] == shown


@pytest.mark.parametrize("text", ["soon", "-1", "1.5", "9" * 30, "2099-13-01", "", "٣", "99999999"])
def test_an_end_that_cannot_be_read_is_wrong_usage(acme, text):
    result = acme("key create acme --expires", text)

    assert result.exit_code == 2
    assert "a number of days (30)" in result.stderr
    assert acme("key list").stdout == ""


@pytest.mark.parametrize("text", ["0", "2001-01-01"])
def test_an_end_in_the_past_is_not_a_legal_value(acme, text):
    assert acme(f"key create acme --expires {text}").exit_code == 6


def test_revoking_by_public_id_shows_the_key_as_revoked(acme):
    public_id = parse_key(acme("key create acme").stdout.strip()).public_id

    result = acme(f"key revoke {public_id}")

    assert result.exit_code == 0
    assert result.stdout.split("\t")[:4] == [public_id, "acme", "", "revoked"]
    assert result.stderr == ""


def test_revoking_by_the_whole_key_works_and_warns_that_others_could_see_it(acme):
    text = acme("key create acme").stdout.strip()

    result = acme(f"key revoke {text}")

    assert result.exit_code == 0
    assert "visible to other users (ps)" in result.stderr
    assert parse_key(text).secret not in result.output


def test_a_lost_secret_given_as_a_public_id_is_not_repeated(acme):
    secret = parse_key(acme("key create acme").stdout.strip()).secret

    result = acme(f"key revoke {secret}")

    assert result.exit_code == 6
    assert secret not in result.output


def test_a_key_given_as_a_tenant_is_not_repeated(acme):
    text = acme("key create acme").stdout.strip()

    for command in ("tenant show", "tenant create", "key create", "key list", "tenant delete --yes"):
        assert parse_key(text).secret not in acme(command, text).output


# How commands end.


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("tenant show nobody", 3),
        ("tenant suspend nobody", 3),
        ("tenant resume nobody", 3),
        ("tenant delete nobody", 3),
        ("tenant delete nobody --yes", 3),
        ("key create nobody", 3),
        ("key list nobody", 3),
        ("key revoke abcdefghijkl", 3),
        ("tenant create acme", 5),
        ("tenant create Acme", 6),
        ("key revoke short", 6),
        ("tenant create", 2),
        ("tenant explode", 2),
        ("key create acme --bogus", 2),
    ],
)
def test_an_exit_code_tells_what_kind_of_failure_it_was(acme, command, exit_code):
    result = acme(command)

    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.output


def test_a_mistyped_name_is_answered_with_the_nearest_one(acme):
    assert "did you mean 'acme'?" in acme("tenant show acmee").stderr


def test_deletion_without_a_terminal_is_refused_and_changes_nothing(acme):
    result = acme("tenant delete acme")

    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert acme("tenant show acme").exit_code == 0


def test_deletion_with_yes_removes_the_tenant_and_its_keys(acme):
    acme("key create acme")

    result = acme("tenant delete acme --yes")

    assert (result.exit_code, result.stdout.split("\t")[:2]) == (0, ["acme", "deleted"])
    assert acme("key list").stdout == ""
    assert acme("tenant list").stdout == ""


def test_a_lack_of_permission_has_an_exit_code_of_its_own(acme):
    acme.config.master_key_file.chmod(0o644)

    result = acme("tenant list")

    assert result.exit_code == 4
    assert "chmod 600" in result.stderr


def test_a_wrong_master_key_makes_no_key_that_nobody_could_use(acme):
    acme.config.master_key_file.write_bytes(b"x" * 32)

    result = acme("key create acme")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert str(acme.config.master_key_file) in result.stderr


def all_commands():
    return [(group.name, name, command) for group in (tenant, key) for name, command in group.commands.items()]


@pytest.mark.parametrize(
    ("group", "name", "command"), all_commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_has_an_example_of_the_very_command(run, group, name, command):
    result = run(f"{group} {name} --help")

    assert result.exit_code == 0
    assert f"halocline {group} {name}" in result.stdout


@pytest.mark.parametrize("group", ["tenant", "key"])
def test_help_of_a_group_tells_the_exit_codes(run, group):
    stdout = " ".join(run(f"{group} --help").stdout.split())

    assert "0 done, 1 failed, 2 wrong usage or not confirmed, 3 not found, 4 no permission, 5 exists already" in stdout


def test_no_command_takes_a_secret_as_an_argument():
    names = {parameter.name for _, _, command in all_commands() for parameter in command.params}

    rules = {"default_file", "max_priority", "max_duration", "clear", "weight", "floor", "ceiling"}
    assert names == {"name", "tenant_name", "public_id", "label", "expires", "yes", "as_json"} | rules
