"""The network interface that gloo uses between nodes."""

import os
import socket
from contextlib import suppress

GLOO = "GLOO_SOCKET_IFNAME"
OUTSIDE = "192.0.2.1"  # reserved for documentation: its route is the default route


def name_for_gloo(peer: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to `peer`, or outside if that is this machine.

    gloo listens at the address of this machine's name. Where /etc/hosts maps the name to 127.0.1.1, as Debian and
    Ubuntu do, no other machine could connect. Nothing is set if the name has another address, if `peer` is a loopback
    address itself, or if the user has set it.
    """
    if GLOO in os.environ or _is_loopback(peer) or not _is_loopback(_address_of(socket.gethostname())):
        return
    routes = (_address_towards(each) for each in (peer, OUTSIDE))
    if found := next((_interface_of(address) for address in routes if not _is_loopback(address)), None):
        os.environ[GLOO] = found


def _is_loopback(address: str | None) -> bool:
    return address is None or address.startswith("127.")


def _address_of(name: str) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return None


def _address_towards(other: str) -> str | None:
    """The address of this machine from which packets to `other` would be sent; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((other, 9))
        return probe.getsockname()[0]
    return None


def _interface_of(address: str) -> str | None:
    import psutil  # megatron-core needs it too

    return next((n for n, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)), None)
