"""The script that makes the salt vectors, from the design and the standard library alone, and the file it made.

`python tests/unit/test_tenants_salt_vectors.py` prints the vectors; they may never change, since every cached block hangs on
its salt.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path

VECTORS = Path(__file__).with_name("test_tenants_salt_vectors.json")

CASES: list[tuple[str, str, int, str | None]] = [
    ("00" * 32, "tn_0000000000000000000000", 1, None),
    ("00" * 32, "tn_0000000000000000000000", 2, None),
    ("00" * 32, "tn_0000000000000000000000", 1, "user-1"),
    ("ff" * 32, "tn_0000000000000000000000", 1, None),
    (bytes(range(32)).hex(), "tn_Dc72jSV9uWDLyisV25PcUd", 0, None),
    (bytes(range(32)).hex(), "tn_Dc72jSV9uWDLyisV25PcUd", 18446744073709551615, None),
    (bytes(range(32)).hex(), "tn_Dc72jSV9uWDLyisV25PcUd", 7, "ünï©ödé \U0001f9c2"),
    (bytes(range(32)).hex(), "tn_Dc72jSV9uWDLyisV25PcUd", 7, "\0"),
    (bytes(range(32)).hex(), "tn_Dc72jSV9uWDLyisV25PcUd", 7, "x" * 1000),
    # The same characters cut at other places: only the lengths tell these two apart.
    (bytes(range(32)).hex(), "tn_1", 1, "1"),
    (bytes(range(32)).hex(), "tn_", 11, "1"),
]


def independent_salt(secret_hex: str, tenant_id: str, epoch: int, subject: str | None) -> str:
    """Written from the design alone."""
    mac = hmac.new(bytes.fromhex(secret_hex), digestmod=hashlib.sha256)
    mac.update(b"halocline/salt/1")
    for part in (tenant_id.encode("utf-8"), str(epoch).encode("ascii"), (subject or "").encode("utf-8")):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return base64.b64encode(mac.digest(), altchars=b"-_").decode("ascii").replace("=", "")


def independent_vectors() -> str:
    names = ("salt_secret_hex", "tenant_id", "epoch", "subject")
    vectors = [dict(zip(names, case, strict=True)) | {"salt": independent_salt(*case)} for case in CASES]
    return json.dumps({"vectors": vectors}, indent=2) + "\n"


if __name__ == "__main__":
    print(independent_vectors(), end="")


def test_the_recorded_vectors_are_what_the_independent_script_prints():
    assert VECTORS.read_text() == independent_vectors()
