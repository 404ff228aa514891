"""Take the IPv4 addresses away from this container's interfaces, except lo, then run a command.

    python3 no_ipv4.py [COMMAND...]

Needs CAP_NET_ADMIN. Source of the numbers: netdevice(7), linux/sockios.h.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFADDR = 0x8916


def main() -> None:
    no_address = struct.pack("HH4s8x", socket.AF_INET, 0, bytes(4))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            if name.startswith("eth"):
                fcntl.ioctl(
                    control, SIOCSIFADDR, struct.pack("16s16s8x", name.encode(), no_address)
                )
    if sys.argv[1:]:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
