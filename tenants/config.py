"""Where the tenant store and its master key are; finding the values is left to the command line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

_LEGAL_URLS = "sqlite:////absolute/path/tenants.db or postgresql://user@host/database"


class TenantsConfig(BaseModel):
    """One frozen object, checked once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    master_key_file: Path

    @field_validator("url")
    @classmethod
    def _url_is_supported(cls, url: str) -> str:
        # The value is not repeated: a PostgreSQL URL may carry a password.
        scheme, _, rest = url.partition("://")
        dialect = scheme.partition("+")[0]
        if dialect not in ("sqlite", "postgresql"):
            raise ValueError(f"the tenant store's URL is of an unknown kind; legal are {_LEGAL_URLS}")
        if dialect == "sqlite" and rest.partition("?")[0] in ("", "/", "/:memory:"):
            raise ValueError(
                f"the tenant store cannot be in memory, several processes share it; legal are {_LEGAL_URLS}"
            )
        return url
