"""The tier's statistics as Prometheus metrics, on loopback, when `metrics_listen` is set.

The endpoint has a thread of its own and reads frozen snapshots only; it never touches the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cached.config import split_loopback
from cached.protocol import TierStatistics

GAUGES = {
    "capacity_bytes": "Bytes of the arena's payloads",
    "allocated_bytes": "Bytes of the payloads whose memory is there",
    "slot_bytes": "Bytes of one slot; 0 when there are several layouts",
    "capacity_slots": "Slots, of all layouts",
    "allocated_slots": "Slots whose memory is there",
    "sessions": "Sessions of engines; one that keeps events has two",
    "used": "Blocks that are stored",
    "idle": "Stored blocks that nobody leases",
    "leased": "Stored blocks under at least one lease",
    "reserved": "Slots being written",
    "waiting": "Blocks committed before one of their ancestors",
    "quarantined": "Slots that a peer may still be writing after its reservation ended",
    "unverified": "Stored blocks that must be verified before they are served",
    "owners": "Owners that hold at least one block",
    "shares_version": "Version of the owners' shares in force; 0: none",
    "floors_total": "Blocks promised to owners as floors",
}
COUNTERS = {
    "looked_up": "Blocks asked for in lookups",
    "found": "Blocks found by lookups",
    "stored": "Blocks stored: committed, with all their ancestors",
    "loaded": "Blocks loaded under leases that held",
    "aborted": "Reservations given up by their peers",
    "expired": "Blocks whose duration passed",
    "dropped": "Blocks removed by an owner's drop",
    "dropped_unused": "Blocks that left the tier without ever having been loaded",
    "verified": "Blocks verified after a restart or on suspicion",
    "corrupt": "Blocks dropped because their bytes did not match their checksum",
    "restored": "Blocks taken over from a former daemon",
    "lost_at_restart": "Records of a former daemon that were torn, or whose chain had a gap",
    "leases_broken": "Releases of leases that had not held",
    "payload_mended": "Times the payload was found cut short or holed by a peer and made whole",
    "reservations_expired": "Reservations neither committed nor aborted in time",
    "sockets_remade": "Times the socket's file was gone and was made again",
}
FAMILIES = {
    "used_by_priority": ("priority", "Blocks stored, by priority"),
    "evicted_by_priority": ("band", "Blocks evicted, by band of priority"),
    "refused_by_reason": ("reason", "Offered blocks refused, by reason"),
}
LAYOUT_GAUGES = {
    "capacity_bytes": "Bytes of a layout's part of the arena",
    "allocated_bytes": "Bytes of a layout's part whose memory is there",
    "slot_bytes": "Bytes of one of a layout's slots",
    "capacity_slots": "A layout's slots",
    "allocated_slots": "A layout's slots whose memory is there",
    "sessions": "Sessions of engines of a layout",
    "used": "Blocks of a layout that are stored",
    "leased": "Blocks of a layout under at least one lease",
    "unverified": "Blocks of a layout that must be verified before they are served",
    "quarantined": "Slots of a layout that a peer may still be writing after its reservation ended",
}
LAYOUT_COUNTERS = {
    "looked_up": "Blocks of a layout asked for in lookups",
    "found": "Blocks of a layout found by lookups",
    "stored": "Blocks of a layout stored",
    "loaded": "Blocks of a layout loaded under leases that held",
    "evicted": "Blocks of a layout evicted",
    "refused": "Offered blocks of a layout refused",
    "verified": "Blocks of a layout verified after a restart or on suspicion",
    "corrupt": "Blocks of a layout dropped because their bytes did not match their checksum",
}
LAYOUT_LABELS = ["layout", "label", "part"]
PREFIX = "halocline_tier_host_"
LAYOUT_PREFIX = PREFIX + "layout_"


class TierCollector(Collector):
    """Turns the latest snapshot into metrics whenever it is scraped."""

    def __init__(self, snapshot: Callable[[], TierStatistics]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One metric per field of `TierStatistics`, and of `LayoutLine` one that bears the layout."""
        statistics = self._snapshot()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(statistics, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(statistics, name))
        for name, (label, text) in FAMILIES.items():
            kind = GaugeMetricFamily if name.startswith("used") else CounterMetricFamily
            family = kind(PREFIX + name, text, labels=[label])
            for count in getattr(statistics, name):
                family.add_metric([count.label], count.value)
            yield family
        for kind, texts in ((GaugeMetricFamily, LAYOUT_GAUGES), (CounterMetricFamily, LAYOUT_COUNTERS)):
            for name, text in texts.items():
                family = kind(LAYOUT_PREFIX + name, text, labels=LAYOUT_LABELS)
                for line in statistics.layouts:
                    if line.fingerprint:
                        family.add_metric([line.fingerprint, line.label, line.name], getattr(line, name))
                yield family


def serve(listen: str, snapshot: Callable[[], TierStatistics]) -> Callable[[], None]:
    """Serve metrics at a loopback HOST:PORT; returns what stops it. Raises OSError when the port is taken."""
    host, port = split_loopback(listen)
    registry = CollectorRegistry()
    registry.register(TierCollector(snapshot))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
