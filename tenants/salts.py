"""The cache salt of a request: derived here, from the tenant's own secret, and nowhere else (architecture decision 11).

Two tenants never share a salt because each has a secret of its own; a subject only divides its own tenant. A changed
epoch is a changed salt, which is how a tenant's cache is dropped. The result is never logged.
"""

from __future__ import annotations

import base64
import hmac

from tenants.errors import InvalidValue
from tenants.values import SALT_SECRET_BYTES, TenantId

SALT_CHARS = 43
_TAG = b"halocline/salt/1"


def derive_salt(salt_secret: bytes, tenant_id: TenantId, epoch: int, subject: str | None) -> str:
    """`base64url_nopad(HMAC-SHA256(salt_secret, tag ‖ lp(tenant id) ‖ lp(epoch) ‖ lp(subject)))`: 43 characters.

    An absent subject is written as an empty one, which is why an empty one is refused: it would name the same cache.
    """
    if len(salt_secret) != SALT_SECRET_BYTES:
        raise ValueError(f"a salt secret has {SALT_SECRET_BYTES} bytes, not {len(salt_secret)}")
    if epoch < 0:
        raise ValueError(f"a salt epoch is not negative; got {epoch}")
    message = (
        _TAG
        + _length_prefixed(tenant_id.encode())
        + _length_prefixed(str(epoch).encode("ascii"))
        + _length_prefixed(_subject_bytes(subject))
    )
    return base64.urlsafe_b64encode(hmac.digest(salt_secret, message, "sha256")).rstrip(b"=").decode("ascii")


def _subject_bytes(subject: str | None) -> bytes:
    if subject is None:
        return b""
    if subject == "":
        raise InvalidValue("the subject of a salt is empty; leave it out or give at least one character")
    try:
        return subject.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("the subject of a salt is not valid Unicode: it holds half of a surrogate pair") from error


def _length_prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
