"""Where the tenant store and its master key are; finding the values is left to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tenants.errors import InvalidValue

_LEGAL_URLS = "sqlite:////absolute/path/tenants.db and postgresql://user@host/database"


class TenantsConfig(BaseModel):
    """One frozen object, checked once."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, Field(description="SQLAlchemy URL of the tenant store.")]
    master_key_file: Annotated[Path, Field(description="File of 32 random bytes, mode 0600; created on first use.")]

    @field_validator("url")
    @classmethod
    def _url_is_supported(cls, url: str) -> str:
        sqlite_path(url)
        return url


def sqlite_path(url: str) -> Path | None:
    """The file that an SQLite URL means, taken literally; None for a PostgreSQL URL; raises InvalidValue otherwise.

    The URL is not repeated in the error: it may carry a password.
    """
    scheme, _, rest = url.partition("://")
    dialect = scheme.partition("+")[0]
    if dialect == "postgresql":
        return None
    if dialect != "sqlite":
        raise InvalidValue(f"the tenant store's URL is of an unknown kind; legal are {_LEGAL_URLS}")
    # Absolute, because several processes share the file and each may have another working directory.
    if not rest.startswith("//"):
        raise InvalidValue(
            f"an SQLite tenant store needs an absolute path and cannot be in memory; legal are {_LEGAL_URLS}"
        )
    return Path(rest[1:])
