"""The errors of the cache daemon and of its client; each says what happened and what to do.

Whose fault decides the kind: `PeerError` closes the session of the peer that caused it, `ArenaError` stops the
start, `TierUnavailable` is the world's and is always handled as a miss.
"""


class CachedError(Exception):
    """Something in the cache tier went wrong."""


class PeerError(CachedError):
    """A peer broke the protocol; its session is closed and nothing else is touched."""


class WireError(PeerError):
    """A frame could not be read: too large, not msgpack, an unknown message, or a field of the wrong type."""


class ArenaError(CachedError):
    """The arena could not be created, reclaimed or locked; the message says what is missing and where."""


class TierUnavailable(CachedError):
    """The daemon did not answer in time or is not there; treat every pending question as a miss."""


class RetentionError(CachedError, ValueError):
    """A `kv_cache_retention_config` breaks a rule; `param` names the field, the message the range and the rule."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
