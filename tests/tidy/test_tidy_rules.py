"""Every rule of the cache's semantics is cited by a test: what is not tested is a wish.

A citation is `kv-semantics 3.4`, `rule 3.4` (or a list of them: `kv-semantics 4.1, 4.2 and 4.5`) in a test's docstring or
comment, or `test_rule_3_4_…` in its name.
"""

from __future__ import annotations

import re

import pytest

from tests.tidy.layers import ROOT

# How many rules each section has, so that a rule which is added or struck changes this line on purpose. §8 is names and
# §9 is cases, both of which have tests of their own.
RULES_OF_SECTION = {1: 6, 2: 7, 3: 7, 4: 6, 5: 10, 6: 3, 7: 2}
RULES = [f"{section}.{rule}" for section, count in RULES_OF_SECTION.items() for rule in range(1, count + 1)]
KINDS = ("unit", "property", "contract", "integration", "gpu")

_IN_PROSE = re.compile(
    r"(?:kv-semantics|\brules?)\s+((?:\d\.\d+)(?:(?:,\s+(?:and\s+)?|\s+and\s+|–)\d\.\d+)*)", re.IGNORECASE
)
_IN_NAMES = re.compile(r"\bdef test_rule_(\d)_(\d+)_")


def cited_in(text: str) -> set[str]:
    """The numbers of the rules that a test file cites."""
    prose = {number for found in _IN_PROSE.findall(text) for number in re.findall(r"\d\.\d+", found)}
    return prose | {f"{section}.{rule}" for section, rule in _IN_NAMES.findall(text)}


def citations() -> dict[str, set[str]]:
    """Rule → the test files that cite it."""
    found: dict[str, set[str]] = {}
    for kind in KINDS:
        for file in sorted((ROOT / "tests" / kind).glob("test_*.py")):
            for rule in cited_in(file.read_text(encoding="utf-8")):
                found.setdefault(rule, set()).add(str(file.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_the_semantics_is_cited_by_a_test(rule: str) -> None:
    assert citations().get(rule), f"no test cites kv-semantics {rule}; name the rule where it is tested"


def test_no_test_cites_a_rule_that_does_not_exist() -> None:
    unknown = {rule: sorted(files) for rule, files in citations().items() if rule not in RULES}

    assert unknown == {}


def test_a_citation_is_found_in_prose_lists_and_names() -> None:
    prose = "Rule 3.4 is held; kv-semantics 4.1, 4.2 and\n    4.5 too. Version 2.6 of something is not a rule."
    names = "def test_rule_1_6_a_second_copy() -> None: ..."

    assert cited_in(prose) == {"3.4", "4.1", "4.2", "4.5"}
    assert cited_in(names) == {"1.6"}
